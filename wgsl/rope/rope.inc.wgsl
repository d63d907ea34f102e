// Parts of the rotary embeddings.

#part pair
// Part of others: the j-th pair of a head, with its elements at `left` and `left + gap` (neighbors where INTERLEAVED).
// A pair that turns has a column of the tables.
  let turns = j < p.turning;
#if INTERLEAVED
  let left = 2u * j;
  let gap = 1u;
#else
  let left = select(j + p.turning, j, turns);
  let gap = select(p.half - p.turning, p.turning, turns);
#endif
  let column = min(j, p.turning - 1u);
#endpart

#part item
// Part of others: the invocation's element or pair j of a row of k or v, and the row's token.
  let at = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (at >= 2u * p.items) { return; }
  let item = at % p.items;
  let j = item % p.half;
  let row = item / p.half;
  let token = row / p.groups;
#endpart

#part append
// Part of others: copy a pair from `src` of k, rotated to `position`, or from `src` of v, to `dst` of its cache.
  if (at < p.items) {
    let entry = position * p.turning + column;
    let c = select(C_T(1.0), cosine[entry], turns);
    let s = select(C_T(0.0), sine[entry], turns);
    let a = C_T(k[src]);
    let b = C_T(k[src + gap]);
    keys[dst] = X_T(a * c - b * s);
    keys[dst + gap] = X_T(b * c + a * s);
  } else {
    values[dst] = v[src];
    values[dst + gap] = v[src + gap];
  }
#endpart
