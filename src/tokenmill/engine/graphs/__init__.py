"""CUDA graphs: their sizes, their capture and the steps that replay them."""
