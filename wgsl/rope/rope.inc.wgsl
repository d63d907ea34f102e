// Parts of the rotary embeddings.

#part pair
// Part of others: the j-th pair of a head, its elements at `left` and at `left + gap`; one that turns has a column of the tables.
  let turns = j < p.turning;
  let left = select(j + p.turning, j, turns);
  let gap = select(p.half - p.turning, p.turning, turns);
  let column = min(j, p.turning - 1u);
#endpart
