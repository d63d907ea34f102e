"""Advice for names of PyTorch that wgrad has under another name or not at all."""

from __future__ import annotations

import difflib

_ON_THE_HOST = "use x.numpy() and NumPy's {0}"
_METHODS = {
    "cuda": 'use x.to("wgpu"), or wgrad.set_default_device',
    "double": "float64 is for the cpu device alone: use x.to(np.float64) there",
    "bfloat16": "use x.to(ml_dtypes.bfloat16), on a device that has it",
    "H": "use T or mT; there are no complex numbers",
    "log1p": "use (1 + x).log(), or F.softplus",
    "erf": 'gelu(approximate="none") is the GELU that is defined with it',
    "scatter": "use wgrad.where, or F.one_hot with a matmul",
    "index_put": "use wgrad.where",
    "retain_grad": "make a leaf of it: wgrad.tensor(x, requires_grad=True)",
    "register_hook": "write an operator with wgrad.register_operator",
    "prod": "use x.log().sum().exp() for positive numbers, or np.prod(x.numpy())",
    "cumsum": "use x @ wgrad.ones(n, n).triu() along the last axis",
    "nonzero": "the number of results is known on the host alone: use np.nonzero(x.numpy())",
    "masked_select": "use wgrad.where(mask, x, 0), or x.numpy()[mask.numpy() != 0]",
    "cumprod": "for positive numbers use (x.log() @ wgrad.ones(n, n).triu()).exp(), along the last axis",
    "diag": "use x * wgrad.eye(n)",
    "diagonal": "use (x * wgrad.eye(n)).sum(-1)",
    **dict.fromkeys(
        ("index_add", "scatter_add", "scatter_reduce"), "use F.one_hot(ids, n).T @ x, or index a table in the forward"
    ),
    "ndimension": "use dim() or ndim",
    "nelement": "use numel() or size",
    "element_size": "use x.dtype.itemsize",
    "addmm": "use x + a @ b",
    "unfold": "use slices and wgrad.stack",
    "is_cuda": "compare x.device.name",
    "isnan": "use np.isnan(x.numpy()); gradients are checked by AdamW(..., max_norm=...)",
    "isinf": "use np.isinf(x.numpy())",
    "isfinite": "use np.isfinite(x.numpy())",
    "new_zeros": "use wgrad.zeros",
    "new_ones": "use wgrad.ones",
    "type": "use x.dtype or x.to",
    **dict.fromkeys(("stride", "is_contiguous", "data_ptr"), "arrays are row-major wherever they are read"),
    **{
        name: _ON_THE_HOST.format(name)
        for name in ("sort", "argsort", "median", "quantile", "unique", "floor", "ceil", "round", "bincount", "histc")
    },
    "topk": "use x.numpy() and NumPy's argsort",
    "multinomial": "use x.numpy() and numpy.random.Generator.choice",
    "fmod": "use x.numpy() and NumPy's fmod",
}
_MODULE = {
    "nn": "there are no modules: a model is a function of its parameters; F is wgrad.functional",
    "optim": "the optimizers are wgrad.SGD and wgrad.AdamW",
    "Adam": "use wgrad.AdamW(..., weight_decay=0)",
    "cuda": "wgrad devices lists the GPUs; wgrad.set_default_device chooses one",
    "save": "use wgrad.save_tensors(tensors, path)",
    "load_state_dict": "use wgrad.load_tensors(path) and copy_",
    "from_numpy": "use wgrad.tensor",
    "as_tensor": "use wgrad.tensor",
    "empty": "use wgrad.zeros",
    "from_dlpack": "use wgrad.tensor with a NumPy array",
    "inference_mode": "use wgrad.no_grad",
    "enable_grad": "leave the block of wgrad.no_grad",
    "get_default_device": "use the device of a Tensor: wgrad.zeros(1).device",
    "concat": "use wgrad.cat",
    "linalg": "use x.norm(dim), or NumPy",
    "allclose": "use np.allclose(a.numpy(), b.numpy())",
    "equal": "use (a == b).all()",
    "meshgrid": "broadcast a[:, None] with b[None]",
    "multinomial": "use p.numpy() and numpy.random.Generator.choice",
    "randn_like": "use wgrad.randn(*x.shape)",
    "rand_like": "use wgrad.rand(*x.shape)",
    "isnan": "use np.isnan(x.numpy())",
    "utils": "use wgrad.functional.checkpoint; data loaders are plain Python",
    "float64": "use np.float64, on the cpu device",
    "int64": "use wgrad.int32",
    "long": "use wgrad.int32",
    "half": "use wgrad.float16",
    "bool": "masks are uint32 of 0 and 1",
    "bfloat16": "use ml_dtypes.bfloat16, on a device that has it",
}
_FUNCTIONAL = {
    "conv1d": "use conv2d of x.unsqueeze(2); short_conv is a causal convolution of each channel",
    "conv_transpose2d": "use repeat_interleave and conv2d",
    "batch_norm": "use x.mean(dim, keepdim=True) and x.var; or layer_norm, rms_norm",
    "group_norm": "use layer_norm of a reshaped x",
    "interpolate": "use repeat_interleave",
    "erf": 'gelu(approximate="none") is the GELU that is defined with it',
    "kl_div": "write (p * (p.log() - log_q)).sum()",
    "softmin": "use softmax(-x)",
    "glu": "use swiglu or geglu",
}


def instead_of_method(name: str, of: type) -> str:
    """Return the end of an error: what to use in place of a method or attribute of torch.Tensor."""
    if name.endswith("_") and not name.startswith("_"):
        base = name[:-1]
        return f": Tensors are not changed in place; use x = x.{base}(...), or copy_ for a parameter"
    return _ending(name, _METHODS, dir(of))


def instead_in_wgrad(name: str, public: list[str], functions: list[str], tensor: type) -> str:
    """Return the end of an error: what to use in place of a name of `torch`. functions: of wgrad.functional."""
    if name in functions:
        method = f", or x.{name}()" if hasattr(tensor, name) else ""
        return f"; use wgrad.functional.{name}{method}"
    return _of_module(name, _MODULE, public, tensor)


def instead_in_functional(name: str, public: list[str], tensor: type) -> str:
    """Return the end of an error: what to use in place of a name of torch.nn.functional."""
    return _of_module(name, _FUNCTIONAL, public, tensor)


def _of_module(name: str, known: dict[str, str], public: list[str], tensor: type) -> str:
    if not name.startswith("_") and name not in known and hasattr(tensor, name):
        return f"; it is a method of Tensors: x.{name}()"
    return _ending(name, {**_METHODS, **known}, public)


def _ending(name: str, known: dict[str, str], names: list[str]) -> str:
    if name.startswith("_"):
        return ""
    if name in known:
        return f": {known[name]}"
    close = difflib.get_close_matches(name, [n for n in names if not n.startswith("_")], n=1)
    return f"; did you mean {close[0]}?" if close else "; docs/reference/autograd.md lists what there is"
