"""Pretrained weights on disk, as transformers and llama.cpp lay them: shape, names, headers. No torch."""
