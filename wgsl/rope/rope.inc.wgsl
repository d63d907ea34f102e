// Parts of the rotary embeddings.

#part pair
// Part of others: the j-th pair of a head, its elements at `left` and at `left + gap`, which are side by side where INTERLEAVED; one that turns has a column of the tables.
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
