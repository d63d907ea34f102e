// Part of gemm_matrix_skinny.wgsl: the block in the registers of set $a, into workgroup memory.
#unroll e X_LOADS
    {
      let e = lid + THREADS * $eu;
      let to = e / X_WIDTH * X_LD + e % X_WIDTH;
      let words = ahead_x_$a_$e;
      let x_low = vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
      let x_high = vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w));
      block[to] = Eight(vec4<f16>(x_low), vec4<f16>(x_high));
    }
#end
#unroll e S_LOADS
    {
      let e = lid + THREADS * $eu;
      let to = e / S_WIDTH * S_LD + e % S_WIDTH;
      let rest_to = to + PIECES;
      let low = ahead_low_$a_$e;
      let high = ahead_high_$a_$e;
      let held_low = held(low);
      let held_high = held(high);
      if (e < S_ROWS * S_WIDTH) {
        pieces[to] = Eight(vec4<f16>(held_low), vec4<f16>(held_high));
        pieces[rest_to] = Eight(vec4<f16>(low - held_low), vec4<f16>(high - held_high));
      }
    }
#end
