"""PyTorch: a registered operator, its gradients, vmap, and torch.compile. Imported only when a tensor is passed."""

import torch

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(
        f"tilewise needs PyTorch 2.6 or newer for tensors, this is {torch.__version__}; update it, or pass arrays "
        "of NumPy (tensor.numpy() shares its memory)"
    )
