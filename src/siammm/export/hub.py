"""The Hugging Face hub: giving it an encoder, and asking it for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from siammm.core.errors import InputError, StoredFileError
from siammm.core.text import one_line
from siammm.runs import files


def check_repository(repo_id: str) -> None:
    """Refuse what cannot be the name of a repository, before anything is computed."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = f"which is not the name of a repository ({one_line(error)})"
        raise InputError(f"--hub is {repo_id!r}, {reason}; give USER/NAME.") from error


def push(folder: Path, repo_id: str) -> str:
    """Push the encoder in a folder, and nothing else that lies there; its address."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="siammm")
    try:
        repository = api.create_repo(repo_id, exist_ok=True).repo_id
        names: list[str] = list(files.PRETRAINED_NAMES)
        message = "Encoder and clusters by siammm"
        api.upload_folder(repo_id=repository, folder_path=folder, allow_patterns=names, commit_message=message)
    except Exception as error:  # what a network, a proxy and a hub raise is of any type
        raise InputError(
            f"The export is complete in {folder}, but {repo_id} cannot be pushed to ({one_line(error)}); log in with "
            "hf auth login, and check the name."
        ) from error
    return f"{api.endpoint}/{repository}"


def fetch(model: str, **options: Any) -> Path:
    """The folder of a model: itself, or a copy of the hub's; ``options`` are those of ``snapshot_download``."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    wanted = [files.NETWORKS, files.MIXTURE, files.CONFIG]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted, **options))
    except TypeError:  # an option that it does not have
        raise
    except Exception as error:  # as above
        raise StoredFileError(
            f"{model} is neither a folder nor a model on the hub ({one_line(error)}); check the path or the name."
        ) from error
