"""Tests; a package so that `from tests.metal import metal_kernel` means this folder everywhere."""
