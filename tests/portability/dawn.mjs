// node dawn.mjs BUNDLE_FOLDER RESULT.json BACKEND compile
// node dawn.mjs BUNDLE_FOLDER RESULT.json BACKEND FIRST STEP    every STEP-th case from FIRST on
// What Dawn makes of a bundle (bundle.json, block.bin). Results are written as they come, a line each.
import { appendFileSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { create, globals } from "webgpu";
import { Runner, compileAll, wanted } from "../../wgsl/runtime/bundle_runner.mjs";

const [folder, output, backend, first, step] = process.argv.slice(2);
Object.assign(globalThis, globals);
const bundle = JSON.parse(readFileSync(join(folder, "bundle.json"), "utf8"));
const bytes = readFileSync(join(folder, "block.bin"));
const block = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
const line = (value) =>
  JSON.stringify(value, (_, v) => (typeof v === "number" && !Number.isFinite(v) ? String(v) : v)) + "\n";

const gpu = (globalThis.gpu = create([`backend=${backend}`])); // held: Dawn ends when it is collected
const adapter = await gpu.requestAdapter();
if (!adapter) throw new Error(`no adapter for backend ${backend}`);
const device = await adapter.requestDevice(wanted(adapter));
const { vendor, architecture, description } = adapter.info;
writeFileSync(output, line({ adapter: `${vendor} ${architecture} ${description}`.trim() }));
if (first === "compile") {
  appendFileSync(output, line(await compileAll(device, bundle)));
} else {
  const runner = new Runner(device, bundle, block);
  for (let i = Number(first); i < bundle.cases.length; i += Number(step)) {
    const begun = performance.now();
    const result = await runner.run(bundle.cases[i]);
    appendFileSync(output, line({ ...result, seconds: (performance.now() - begun) / 1000 }));
  }
}
process.exit(0); // Dawn's own threads would keep the process
