// Decide, between backward and update, whether the step is applied and what factor gradients are multiplied by.
//   norm [2] f32: sum of squares, number of gradients that are not finite; hyper [4]: lr, max_norm, growth_interval, -;
//   state [8] f32: applied, good, apply, factor, grad_norm, bias1, bias2, skipped; loss_scale [1] f32; both in place
//   total = sqrt(norm) / loss_scale;  factor = min(1, max_norm / (total + 1e-6)) / loss_scale (max_norm 0: no clipping)
// Bias corrections are updated as c = beta c + (1 - beta) from 0, so that no digits cancel. A sum that is not finite
// (by its exponent bits) counts as a gradient that is not.
// Dispatch: one workgroup of one invocation.
// Sources: Pascanu et al., On the Difficulty of Training RNNs (2013); Micikevicius et al., Mixed Precision Training
// (2018).
struct Params { beta1: f32, rest1: f32, beta2: f32, rest2: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> norm: array<f32>;
@group(0) @binding(2) var<storage, read> hyper: array<f32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;
@group(0) @binding(4) var<storage, read_write> loss_scale: array<f32>;

const MAX_LOSS_SCALE = 65536.0;

@compute @workgroup_size(1)
fn main() {
  let interval = hyper[2];
  let scale = loss_scale[0];
  if (norm[1] > 0.0 || (bitcast<u32>(norm[0]) & 0x7f800000u) == 0x7f800000u) {
    state[2] = 0.0;
    state[3] = 0.0;
    state[4] = -1.0;
    state[7] += 1.0;
    state[1] = 0.0;
    if (interval > 0.0) { loss_scale[0] = max(1.0, scale * 0.5); }
    return;
  }
  let total = sqrt(norm[0]) / scale;
  var factor = 1.0 / scale;
  if (hyper[1] > 0.0) { factor *= min(1.0, hyper[1] / (total + 1e-6)); }
  state[2] = 1.0;
  state[3] = factor;
  state[4] = total;
  state[0] += 1.0;
  state[5] = state[5] * p.beta1 + p.rest1;
  state[6] = state[6] * p.beta2 + p.rest2;
  state[1] += 1.0;
  if (interval > 0.0 && state[1] >= interval) {
    loss_scale[0] = min(MAX_LOSS_SCALE, scale * 2.0);
    state[1] = 0.0;
  }
}
