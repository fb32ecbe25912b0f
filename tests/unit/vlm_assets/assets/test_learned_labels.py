"""What a home keeps of the labels that a model learned."""

import threading

from vlm_assets.assets import learned_labels
from vlm_assets.assets.learned_labels import (
    LEARNED_LABELS,
    LearnedLabels,
    forget_kept,
    forget_learned,
    keep_learned,
    write_learned,
)
from vlm_assets.config.settings import load_settings
from vlm_durable.files.files import temporary_name
from vlm_engine.model_source import ModelSource, exact_revision


def test_a_withdrawal_forgets_also_what_a_run_is_about_to_keep(tmp_path, monkeypatch):
    """A run has read the labels and not kept them yet: the withdrawal waits, and takes its property out."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_learned(folder, ["gone", "stays"], tmp_path, made_of="training")
    settings = load_settings(home=tmp_path / "home", model=str(folder))
    kept = settings.state_directory / "learned"
    kept.mkdir(parents=True)
    killed = temporary_name(kept / "one.json")
    killed.touch()

    def withdraw() -> None:
        forget_learned(folder / LEARNED_LABELS, ["gone"])
        list(forget_kept(settings, ["gone"]))

    withdrawal = threading.Thread(target=withdraw)
    write_replacing = learned_labels.write_replacing

    def write(path, content):
        if path.parent == kept and withdrawal.ident is None:
            withdrawal.start()
            withdrawal.join(timeout=0.5)
        write_replacing(path, content)

    monkeypatch.setattr(learned_labels, "write_replacing", write)
    keep_learned(settings, exact_revision(ModelSource(str(folder))))
    withdrawal.join()
    (path,) = kept.iterdir()
    assert "stays" in LearnedLabels.read(path) and "gone" not in LearnedLabels.read(path)
    assert not killed.exists()
