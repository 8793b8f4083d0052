"""attn-qat inside other packages. A module here imports its package when it is imported itself, never before.

`sdpa` needs torch alone; `transformers`, `diffusers` and `fastvideo` register an attention implementation there.
"""


def missing(package: str, requirement: str) -> ModuleNotFoundError:
    """The error for an optional package that is not installed."""
    return ModuleNotFoundError(
        f"attn_qat.integrations.{package} needs {package}, which is not installed: "
        f"pip install '{requirement}'",
        name=package,
    )
