// Part of others: bits that pass through it may have changed for all that a compiler knows, so that it cannot compute
// across. p.zero is 0 at every launch.
fn optimisation_barrier(bits: u32) -> u32 { return bits | p.zero; }
