// Runs a bundle of cases (autograd/selftest/bundle.py) on a GPUDevice and judges the results. An ES module without imports:
// the same file runs in Node and in the page that `wgrad selftest --page` writes.

const KIND = {
  float32: [4, (bytes) => new Float32Array(bytes)],
  int32: [4, (bytes) => new Int32Array(bytes)],
  uint32: [4, (bytes) => new Uint32Array(bytes)],
  uint8: [1, (bytes) => new Uint8Array(bytes)],
  float16: [2, (bytes) => Float32Array.from(new Uint16Array(bytes), fromFloat16)],
  bfloat16: [2, (bytes) => new Float32Array(Uint32Array.from(new Uint16Array(bytes), (bits) => bits << 16).buffer)],
};

function fromFloat16(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// The functions of autograd/selftest/finish.py, by the same names: outputs by name -> values to judge, by name.
// As there, differences are rounded to float32 once.
const f32 = Math.fround;
const FINISH = {
  "": (made) => made,
  elements: (made) =>
    Object.fromEntries(Object.entries(made).flatMap(([name, a]) => Array.from(a, (v, i) => [`${name}[${i}]`, [v]]))),
  step: ({ before, ...rest }) => ({ ...rest, step: Array.from(rest.p, (v, i) => f32(v - before[i])) }),
  nf4: ({ absmax, restored, w }) => ({ absmax, error: Array.from(restored, (v, i) => Math.abs(f32(v - w[i]))) }),
  "nf4 double": ({ absmax, plain_packed, packed, codes, nested_absmax, code, offset }) => {
    const restored = Array.from(codes, (c, i) => f32(f32(code[c] * nested_absmax[Math.floor(i / 256)]) + offset[0]));
    const error = restored.map((v, i) => Math.abs(f32(v - absmax[i])));
    error.push(absmax.reduce((most, v) => Math.max(most, v), -Infinity));
    const other = packed.reduce((count, v, i) => count + (v !== plain_packed[i] ? 1 : 0), 0);
    return { error, offset, code, "other codes": [other] };
  },
};

// Why a device cannot run a case, or "".
function missing(device, bundle, one) {
  if (one.float16 && !device.features.has("shader-f16")) return "no shader-f16";
  for (const step of one.steps) {
    const shader = step[0] === "run" ? bundle.shaders[step[1]] : null;
    const reason = shader ? tooLarge(device, shader) : "";
    if (reason) return reason;
  }
  return "";
}

function tooLarge(device, shader) {
  const { maxStorageBuffersPerShaderStage: storage, maxComputeWorkgroupStorageSize: memory } = device.limits;
  if (shader.storage > storage) return `${shader.storage} storage buffers, the adapter has ${storage}`;
  // Kernels for a larger workgroup memory may need less than all of it, but only a device that has it gets them.
  if (shader.workgroup_bytes > memory) return `${shader.workgroup_bytes} bytes of workgroup memory, the adapter has ${memory}`;
  return "";
}

// What to ask of an adapter: the features that the cases use, and its own limits.
export function wanted(adapter) {
  const names = [
    "maxStorageBuffersPerShaderStage", "maxComputeWorkgroupStorageSize", "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupSizeX", "maxStorageBufferBindingSize", "maxBufferSize",
  ];
  return {
    requiredFeatures: adapter.features.has("shader-f16") ? ["shader-f16"] : [],
    requiredLimits: Object.fromEntries(names.map((name) => [name, adapter.limits[name]])),
  };
}

const about = (shader) => `${shader.label}:${shader.entry}`;

// A shader module; an Error with the compiler's own lines where the text is not valid.
async function parse(device, shader) {
  device.pushErrorScope("validation");
  const module = device.createShaderModule({ label: shader.label, code: shader.code });
  const messages = (await module.getCompilationInfo()).messages.filter((m) => m.type === "error");
  const scoped = await device.popErrorScope();
  const problem = messages.map((m) => `line ${m.lineNum}: ${m.message}`).join("; ") || (scoped && scoped.message);
  if (problem) throw new Error(`${about(shader)} does not compile: ${problem}`);
  return module;
}

// {pipeline, layout} of a shader; an Error that names the variant where it does not compile. parsed: its module, if it is
// there already.
async function compile(device, shader, parsed) {
  const module = parsed ?? (await parse(device, shader));
  const entries = shader.bindings.map(([binding, type]) => ({ binding, visibility: 4, buffer: { type } }));
  const layout = device.createBindGroupLayout({ entries });
  try {
    const pipeline = await device.createComputePipelineAsync({
      layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
      compute: { module, entryPoint: shader.entry },
    });
    return { pipeline, layout };
  } catch (error) {
    throw new Error(`${about(shader)} does not compile: ${error.message}`);
  }
}

// Parse every shader and compile each that the device's limits allow; without `each`, only one of each entry point and
// precision. -> {parsed, compiled, alike: skipped as like another, left: {why not compiled: count},
// failed: [{shader, message}]}.
export async function compileAll(device, bundle, each = true) {
  const result = { parsed: 0, compiled: 0, alike: 0, left: {}, failed: [] };
  const made = new Set();
  for (const [number, shader] of bundle.shaders.entries()) {
    try {
      if (shader.float16 && !device.features.has("shader-f16")) throw new Error("the adapter has no shader-f16");
      const module = await parse(device, shader);
      result.parsed += 1;
      const reason = tooLarge(device, shader);
      const kind = `${shader.label} ${shader.entry} ${shader.float16}`;
      if (reason) result.left[reason] = (result.left[reason] || 0) + 1;
      else if (!each && made.has(kind)) result.alike += 1;
      else {
        await compile(device, shader, module);
        made.add(kind);
        result.compiled += 1;
      }
    } catch (error) {
      result.failed.push({ shader: number, message: error.message });
    }
  }
  return result;
}

export class Runner {
  // block: an ArrayBuffer.
  constructor(device, bundle, block) {
    this.device = device;
    this.bundle = bundle;
    this.block = block;
    this.pipelines = new Map();
  }

  pipeline(number) {
    if (!this.pipelines.has(number)) this.pipelines.set(number, compile(this.device, this.bundle.shaders[number]));
    return this.pipelines.get(number);
  }

  // Run a case and judge it -> {name, output, error, limit, ok, message, skipped}. Never throws for a case's own fault.
  async run(one) {
    const result = { name: one.name, profile: one.profile, output: "", error: NaN, limit: NaN, ok: false, message: "" };
    result.skipped = missing(this.device, this.bundle, one);
    if (result.skipped) return result;
    try {
      return Object.assign(result, this.judge(one, FINISH[one.finish](await this.compute(one))));
    } catch (error) {
      return Object.assign(result, { error: Infinity, limit: 0, message: error.message });
    }
  }

  // A case's steps on buffers of its own -> outputs by name, as arrays of numbers.
  async compute(one) {
    const { device } = this;
    for (const step of one.steps) if (step[0] === "run") await this.pipeline(step[1]);
    device.pushErrorScope("validation");
    device.pushErrorScope("out-of-memory");
    const buffers = one.buffers.map(([size, uniform]) => this.buffer(size, uniform));
    let pending = [];
    for (const step of one.steps) {
      if (step[0] === "run") pending.push(step);
      else {
        await this.submit(pending, buffers);
        pending = [];
        const [, buffer, offset, at, size] = step;
        device.queue.writeBuffer(buffers[buffer], offset, this.block, at, Math.ceil(size / 4) * 4);
      }
    }
    await this.submit(pending, buffers);
    const made = {};
    for (const { name, buffer, offset, size, dtype } of one.made) {
      const [width, view] = KIND[dtype];
      made[name] = view((await this.read(buffers[buffer], offset, size * width)).slice(0, size * width));
    }
    const errors = [await device.popErrorScope(), await device.popErrorScope()].filter(Boolean);
    for (const buffer of buffers) buffer.destroy();
    if (errors.length) throw new Error(errors.map((e) => e.message).join("; "));
    return made;
  }

  // Storage starts as NaN, so that reads of unwritten values show.
  buffer(size, uniform) {
    const usage = uniform
      ? GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST
      : GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    const buffer = this.device.createBuffer({ size, usage, mappedAtCreation: !uniform });
    if (!uniform) {
      new Uint8Array(buffer.getMappedRange()).fill(0xff);
      buffer.unmap();
    }
    return buffer;
  }

  async submit(steps, buffers) {
    if (!steps.length) return;
    const encoder = this.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    for (const [, number, bindings, groups] of steps) {
      const { pipeline, layout } = await this.pipeline(number);
      const entries = bindings.map(([binding, buffer, offset, size]) => ({
        binding, resource: { buffer: buffers[buffer], offset, size },
      }));
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, this.device.createBindGroup({ layout, entries }));
      pass.dispatchWorkgroups(...groups);
    }
    pass.end();
    this.device.queue.submit([encoder.finish()]);
  }

  async read(source, offset, size) {
    const whole = Math.ceil(size / 4) * 4;
    const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
    const staging = this.device.createBuffer({ size: whole, usage });
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(source, offset, staging, 0, whole);
    this.device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    const bytes = staging.getMappedRange().slice(0);
    staging.destroy();
    return bytes;
  }

  // The output that came nearest to its limit, as autograd/selftest/run.py judges.
  judge(one, found) {
    let worst = { output: "", error: 0, limit: 0, badness: -1 };
    for (const { name, at, size, dtype, limit } of one.expected) {
      const value = found[name];
      const oracle = KIND[dtype][1](this.block.slice(at, at + 4 * size));
      let error = value && value.length === size ? 0 : Infinity;
      for (let i = 0; i < size && error < Infinity; i++) {
        const difference = Math.abs(value[i] - oracle[i]);
        error = difference <= error ? error : Number.isFinite(difference) ? difference : Infinity;
      }
      const badness = limit > 0 ? error / limit : error === 0 ? 0 : Infinity;
      if (badness > worst.badness) worst = { output: name, error, limit, badness };
    }
    const { badness, ...told } = worst;
    return { ...told, ok: badness >= 0 && badness <= 1 };
  }
}
