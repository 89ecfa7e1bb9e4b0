"""Weights in the files of other projects, straight onto a mesh: safetensors and Hugging Face.

A file is read through ``TensorReader``; ``TensorView`` says where in its tensors the elements of a
model's array are. safetensors is loaded when it is first used.
"""
