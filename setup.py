"""What pyproject.toml cannot say: fasttrain needs the kernels of its own version, kernels/VERSION."""

from pathlib import Path

from setuptools import setup

VERSION = Path(__file__).with_name("kernels").joinpath("VERSION").read_text().strip()

setup(
    version=VERSION,
    install_requires=[
        f"fasttrain-kernels=={VERSION}",  # and with it torch and triton
        "numpy>=1.26",
        "rich>=13",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "tomli-w>=1",
        "tyro>=1",
    ],
)
