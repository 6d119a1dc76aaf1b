"""An optional progress bar over a call's completions, with rate and time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(completions: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """What is to be called with the number of completions just answered. The bar needs the extra `progress`."""
    if not shown:
        yield lambda _answered: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ImportError("progress=True needs tqdm: pip install 'logprobd-client[progress]'") from error
    with tqdm(total=completions, unit=" completions") as bar:
        yield bar.update
