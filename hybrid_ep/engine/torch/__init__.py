"""The torch engine: plain PyTorch on `torch.distributed`, for every machine."""
