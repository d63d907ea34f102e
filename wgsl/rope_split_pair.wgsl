// Part of rope_split.wgsl: a pair of the array $x.
#if JOIN
    let a = C_T($x[apart]);
    let b = C_T($x[apart + p.half]);
    qkv[together] = X_T(a * c + b * s);
    qkv[together + p.half] = X_T(b * c - a * s);
#else
    let a = C_T(qkv[together]);
    let b = C_T(qkv[together + p.half]);
    $x[apart] = X_T(a * c - b * s);
    $x[apart + p.half] = X_T(b * c + a * s);
#endif
