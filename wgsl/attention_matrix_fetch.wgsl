// Part of attention_matrix_dkv.wgsl: the tile of queries from t_next on of head h_next, into registers.
#unroll n LOADS_COLUMNS
    let at_$n = lid + $nu * THREADS;
    let source_$n = ((b * p.queries + min(t_next + at_$n / W4, p.queries - 1u)) * p.heads + h_next) * W4 + at_$n % W4;
    let q_next_$n = q[source_$n];
    let dy_next_$n = dy[source_$n];
#end
    let t_mine = min(t_next + lid % BN, p.queries - 1u);
    let low = select(NEVER, first_seen(doc_start[b * p.queries + t_mine], t_mine), t_next + lid % BN < p.queries);
    let stat = stats[(b * p.heads + h_next) * p.queries + t_mine];
