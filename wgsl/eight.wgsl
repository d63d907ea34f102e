// Part of the kernels for matrix units: what stands in workgroup memory for them, of 16 bytes, so that one store writes it and
// cooperative matrices are read as such; and 16 bits on their way there, read 16 bytes at a time, as words: two reads of
// vec4<f16> stay two, because each has its own bounds.
struct Eight { low: vec4<f16>, high: vec4<f16> }
fn four_of(words: vec2<u32>) -> vec4<f16> { return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y))); }
