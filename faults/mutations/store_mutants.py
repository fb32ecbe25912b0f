"""The safeguards of what is published in a store, each to be taken out once: file, text, replacement, promise.

The tests that hold the safeguards of a file stand beside it in ``TESTS``.
"""

from __future__ import annotations

from faults.mutations.mutant import Mutant

_STORED = "vlm_durable/versions/stored.py"
_FENCED = "vlm_durable/versions/fenced_object.py"
_JOURNAL = "vlm_durable/mirror/stored_journal.py"
_TRAINING = "vlm_training/training_store.py"

_PARTITIONS = "tests/integration/vlm_durable/versions/test_stored.py"
_MODELS = "tests/integration/vlm_training/test_training_store.py"

TESTS = {
    _STORED: [_PARTITIONS],
    _FENCED: [_PARTITIONS, _MODELS],
    _JOURNAL: ["tests/integration/vlm_durable/mirror/test_stored_journal.py"],
    _TRAINING: [_MODELS],
}

MUTANTS = (
    Mutant(_STORED, "                self._refuse_overtaken(local, published)\n", "", "a version that this machine did not start from is not replaced in the store"),
    Mutant(_STORED, "                if published is None:\n                    self._refuse_unproven(partition, local, stored)\n", "", "a store that was emptied is not filled from any machine"),
    Mutant(_STORED, "(stored.pending is not None or stored.sequence >= record.sequence)", "(stored.pending is None and stored.sequence >= record.sequence)", "a machine that only verifies takes back no publication under way"),
    Mutant(_STORED, "        if newest > record.sequence:\n            raise", "        if False:\n            raise", "an older version of the store replaces no newer one here"),
    Mutant(_STORED, "        if local.published is None or (file is not None and not _has(local, file.sha256)):\n", "        if local.published is None:\n", "a file of another version in the store is not replaced without its record"),
    Mutant(_STORED, "                fenced.refuse_overtaken()\n                fenced.put(self._name(path), verified_bytes(source, version.sha256), over=file_object)\n", "                fenced.put(self._name(path), verified_bytes(source, version.sha256), over=self._store.head(self._name(path)))\n", "a repair replaces nothing that another machine publishes"),
    Mutant(_STORED, "            if partition.holds(partition.slot(number), version)\n        ]", "        ]", "a damaged earlier version keeps no publication from the store"),
    Mutant(_STORED, "        if pending is not None and pending.sequence > local.sequence:\n", "        if False:\n", "a machine that is behind does not go before one that fills the store"),
    Mutant(_FENCED, "self._store.put(name, content, over=over)", "self._store.put(name, content, over=self._store.head(name))", "the record in the store is replaced only where it is the one that was read"),
    Mutant(_FENCED, "        self.put_record(pending)\n", "", "the record in the store says that a publication begins before a file is put"),
    Mutant(_FENCED, "                self.refuse_overtaken()\n                try:", "                try:", "a machine that was overtaken puts no file"),
    Mutant(_FENCED, "                if hashlib.sha256(content).hexdigest() == sha256:\n", "                if True:\n", "bytes from the store are compared with their digest"),
    Mutant(_FENCED, "    if hashlib.sha256(content).hexdigest() != sha256:\n        raise FileDamagedError", "    if False:\n        raise FileDamagedError", "a damaged file of a home is not copied to the store"),
    Mutant(_JOURNAL, "            self._put_head(replace(self._new_head(epoch), manifest=data))\n        elif", "            self._put_head(replace(self._new_head(epoch), manifest=data))\n        elif False and", "an overtaken machine learns so where it has nothing to copy"),
    Mutant(_JOURNAL, "            list(pool.map(self._put_segment, missing))\n", "            self.copied_names.update(record.name for record in missing)\n", "segments are in the store before the head lists them"),
    Mutant(_JOURNAL, "        if not hashlib.sha256(data).hexdigest().startswith(sha256):\n", "        if False:\n", "a segment of the store is compared with its digest"),
    Mutant(_JOURNAL, "            if doubt and not accept_missing:\n", "            if False:\n", "a damaged head over segments that may be missing is refused"),
    Mutant(_JOURNAL, "        if other is not None and other.writer == self._writer:\n", "        if other is not None:\n", "a head of another machine is not taken for this machine's own"),
    Mutant(_JOURNAL, "            self._head_object = expected_object\n            raise\n", "            raise\n", "a machine at work puts nothing over a head that it cannot read"),
    Mutant(_JOURNAL, "            raise OSError(f\"{path} is not what was committed: it was not copied\")\n", "            pass\n", "a damaged segment of a home is not copied to the store"),
    Mutant(_TRAINING, "                if file.seal() == digest_in(name):\n", "                if file.seal():\n", "a checkpoint from the store is compared with the digest in its name"),
    Mutant(_TRAINING, "        if stored is not None and not is_same and stored[\"sequence\"] >= record[\"sequence\"]:\n", "        if False:\n", "a model of a later training is not replaced in the store"),
    Mutant(_TRAINING, "                if fenced.is_overtaken:\n                    return", "                if False:\n                    return", "who was overtaken removes no file of the newer model"),
    Mutant(_TRAINING, "            if not over or stored[\"sequence\"] >= record[\"sequence\"]:\n", "            if not over:\n", "of two models of one training the one with the lower number replaces none"),
)  # fmt: skip
