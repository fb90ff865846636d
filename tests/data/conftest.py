from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `datasets` and downloads keep goes below the test's own folder."""
    import datasets.config

    cache = tmp_path / "cache of datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", str(cache / "downloads"))
    return cache
