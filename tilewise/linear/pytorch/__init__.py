"""Linear attention on tensors: a registered operator, gradients, torch.compile. Imported when a tensor is passed."""
