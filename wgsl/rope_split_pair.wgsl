// Part of rope_split.wgsl: a pair of the array $x.
#if JOIN
    let a = C_T($x[apart]);
    let b = C_T($x[apart + gap]);
    qkv[together] = X_T(a * c + b * s);
    qkv[together + gap] = X_T(b * c - a * s);
#else
    let a = C_T(qkv[together]);
    let b = C_T(qkv[together + gap]);
    $x[apart] = X_T(a * c - b * s);
    $x[apart + gap] = X_T(b * c + a * s);
#endif
