"""PyTorch: a registered operator, its gradients, vmap, and torch.compile. Imported only when a tensor is passed."""

import torch

if not hasattr(torch.library, "register_autograd"):
    raise ImportError(
        f"tilewise needs PyTorch 2.4 or newer for tensors, this is {torch.__version__}; update it, or pass arrays "
        "of NumPy (tensor.numpy() shares its memory)"
    )
