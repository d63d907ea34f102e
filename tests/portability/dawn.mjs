// node dawn.mjs BUNDLE_FOLDER RESULT.json BACKEND compile [all]
// node dawn.mjs BUNDLE_FOLDER RESULT.json BACKEND FIRST STEP    every STEP-th case from FIRST on
// node dawn.mjs "" RESULT.json BACKEND probe                    the adapter alone
// What Dawn makes of a bundle (bundle.json, block.bin). Results are written as they come, a line each.
import { appendFileSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { create, globals } from "webgpu";
import { Runner, compileAll, wanted } from "../../wgsl/bundle_runner.mjs";

const [folder, output, backend, first, step] = process.argv.slice(2);
Object.assign(globalThis, globals);
// The binding asks its device again at every turn of the event loop while something is awaited: that took a core from a
// driver that computes on the CPU.
globalThis.setImmediate = (callback, ...values) => setTimeout(callback, 2, ...values);
const line = (value) =>
  JSON.stringify(value, (_, v) => (typeof v === "number" && !Number.isFinite(v) ? String(v) : v)) + "\n";

function readBundle() {
  const bytes = readFileSync(join(folder, "block.bin"));
  const block = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  return [JSON.parse(readFileSync(join(folder, "bundle.json"), "utf8")), block];
}

const gpu = (globalThis.gpu = create([`backend=${backend}`])); // held: Dawn ends when it is collected
const adapter = await gpu.requestAdapter();
if (!adapter) throw new Error(`no adapter for backend ${backend}`);
const device = await adapter.requestDevice(wanted(adapter));
const { vendor, architecture, description } = adapter.info;
const { maxComputeWorkgroupStorageSize: workgroup_bytes, maxStorageBuffersPerShaderStage: storage } = adapter.limits;
const name = `${vendor} ${architecture} ${description}`.trim();
writeFileSync(output, line({ adapter: name, float16: adapter.features.has("shader-f16"), workgroup_bytes, storage }));
if (first === "compile") {
  appendFileSync(output, line(await compileAll(device, readBundle()[0], step === "all")));
} else if (first !== "probe") {
  const [bundle, block] = readBundle();
  const runner = new Runner(device, bundle, block);
  for (let i = Number(first); i < bundle.cases.length; i += Number(step))
    appendFileSync(output, line(await runner.run(bundle.cases[i])));
  const { userCPUTime, systemCPUTime, maxRSS } = process.resourceUsage();
  appendFileSync(output, line({ cpu_s: (userCPUTime + systemCPUTime) / 1e6, peak_bytes: 1024 * maxRSS }));
}
process.exit(0); // Dawn's own threads would keep the process
