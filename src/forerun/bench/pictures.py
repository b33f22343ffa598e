"""Where pictures come from: matplotlib without a screen, when it is installed."""

from __future__ import annotations

from typing import Any

from forerun.errors import ConfigError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Commands ask for it before they measure for minutes, too.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ConfigError("a picture needs matplotlib; install it with: pip install 'forerun[bench]'") from error
    return pyplot
