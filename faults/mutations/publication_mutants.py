"""The safeguards of a publication, each to be taken out once: file, exact text, replacement, promise."""

from __future__ import annotations

from faults.mutations.mutant import Mutant

_ROWS = "vlm_durable/versions/partition_rows.py"
_FILES = "vlm_durable/versions/partition_files.py"
_OBJECT = "vlm_durable/versions/versioned_object.py"
_MARK = "vlm_durable/versions/version_mark.py"
_IO = "resources/parquet_io.py"
_STATES = "vlm_assets/assets/partition_state.py"
_PUBLISHED = "vlm_durable/versions/published.py"

MUTANTS = (
    Mutant(_PUBLISHED, "        if self.wrong_ids is not None:\n", "        if False:\n", "a wrong id set is not published"),
    Mutant(_PUBLISHED, "        if damage := judge(self.path, self.record, deep=True):\n", "        if damage := ():\n", "what is published is what was read back"),
    Mutant(_ROWS, "    if counts.total() != rows:\n", "    if False:\n", "a staged file has the rows that were written"),
    Mutant(_ROWS, "write_page_checksum=True", "write_page_checksum=False", "published files: page checksums are written"),
    Mutant(_PUBLISHED, "                in_use.try_lock()\n", "", "a living process's temporary file is marked"),
    Mutant(_FILES, "            if is_held(path) is False:\n", "            if True:\n", "only an abandoned temporary file is removed"),
    Mutant(_PUBLISHED, "            sha256 = sink.seal()\n", "            sha256 = sink._digest.hexdigest()\n", "a staged file is sealed before it is read back"),
    Mutant(_ROWS, "pq.ParquetFile(self.path, page_checksum_verification=True, pre_buffer=False)",
           "pq.ParquetFile(self.path, pre_buffer=False)", "reading rows verifies page checksums"),
    Mutant(_OBJECT, "acquire_lock(self.paths.publication_lock, ", "acquire_lock(files.temporary_name(self.paths.publication_lock), ", "one publisher at a time (flock)"),
    Mutant(_FILES, " and files.sha256_of(path) == record.sha256\n", "\n", "a file is a version by its SHA-256"),
    Mutant(_FILES, "        if sha256 != record.sha256:\n", "        if False:\n", "a copy is compared with its record"),
    Mutant(_FILES, "        files.sync_directory(self.published.parent)\n        self._complete(pending", "        self._complete(pending", "a rename that a killed process left is made durable"),
    Mutant(_FILES, "        self.keep_aside_unless(versions.published, notes)\n", "", "what no backup holds is kept before it is replaced"),
    Mutant(_FILES, "        self.keep_aside_unless(record, notes)\n", "", "restoring keeps the damaged file"),
    Mutant(_FILES, "            self.keep_aside_unless(versions.published, repairs)\n", "", "finishing a publication keeps what stood there"),
    Mutant(_FILES, "        self.write_record(self.record_path, exchange)\n", "", "the record names both versions while they are exchanged"),
    Mutant(_FILES, "        self.write_record(self.record_copy, exchange)\n", "", "the record's copy names both versions too"),
    Mutant(_OBJECT, "in reversed(self.record_paths):\n", "in self.record_paths[:1]:\n", "the record has a second copy"),
    Mutant(_OBJECT, "        for path in reversed(self.record_paths):\n", "        for path in self.record_paths[1:]:\n", "the record is settled"),
    Mutant(_FILES, "        copy = self._copy(temporary, self.slot(0), record)\n", "        copy = None\n", "the second copy is whole before the name is taken over"),
    Mutant(_FILES, "            if version and self.holds(self.slot(number), version):\n", "            if version:\n", "only a backup that verifies counts as one"),
    Mutant(_FILES, "        if current and not self.holds(self.slot(0), current) and self.holds(self.published, current):\n", "        if False:\n", "a damaged second copy is made anew before it is rotated"),
    Mutant(_FILES, "            if self.holds(self.slot(source), version):\n", "            if self.slot(source).exists():\n", "only a file that verifies is rotated"),
    Mutant(_FILES, "        if self.slot(0).exists():\n            self.move_aside(self.slot(0), notes)\n", "", "a damaged second copy is kept aside"),
    Mutant(_FILES, "                if copy.path.exists():\n                    self.move_aside(copy.path, repairs)\n", "", "a damaged record is kept aside"),
    Mutant(_OBJECT, "        if damage is not None and not whole:\n", "        if False:\n", "two unreadable records are not 'nothing published'"),
    Mutant(_PUBLISHED, "        staged.refuse_unfit()\n", "", "an unfit file is refused"),
    Mutant(_PUBLISHED, "            if partition.mark.next_sequence(versions.sequence) != staged.record.sequence:\n", "            if False:\n", "a publisher that was overtaken is fenced"),
    Mutant(_PUBLISHED, "            if not file_whole and not copy_whole:\n", "            if False:\n", "restoring from what is not whole is refused"),
    Mutant(_PUBLISHED, "        if staged.asset != self.asset:\n", "        if False:\n", "a file of another asset is refused"),
    Mutant(_PUBLISHED, "        if damage:\n", "        if False:\n", "a damaged file is not handed out"),
    Mutant(_FILES, "    if sha256 == record.sha256:\n        return None\n", "    if sha256:\n        return None\n", "verifying compares the SHA-256"),
    Mutant(_FILES, "    if size != record.bytes or sha256 is not None:\n", "    if sha256 is not None:\n", "a shallow look compares the size"),
    Mutant(_FILES, '            if content["format"] > 1 and content["asset"] != asset:\n', "            if False:\n", "another asset's record is not read as this one's"),
    Mutant(_FILES, "                if not may_be_same_origin(version.origin, origin):\n", "                if False:\n", "another home's record is not read as this one's"),
    Mutant(_MARK, "self._read(self._asset.origin)", "self._read(\"\")", "another home's mark is not read as this one's"),
    Mutant(_FILES, "        self.mark.write(self._mark(published))\n", "", "a publication is marked when it is durable"),
    Mutant(_FILES, "        return comparison in (MarkComparison.OLDER, MarkComparison.OTHER)\n", "        return comparison is MarkComparison.OLDER\n", "another version of the same number is not the marked one"),
    Mutant(_FILES, "        if older is not None:\n            raise PutBackError", "        if False:\n            raise PutBackError", "an older version is never silently taken for the newest"),
    Mutant(_MARK, "marked, *(mark.sequence for mark in reading.marks))) + 1\n", "marked)) + 1\n", "a version's number is not given twice"),
    Mutant(_FILES, "        if reading.is_unreadable:\n            self._refuse_doubt(records)\n", "", "a mark that cannot be read is not taken for none"),
    Mutant(_FILES, "        return self.renumber(older, self.mark.next_sequence(*(record.latest_sequence for record in records)))\n", "        return self.renumber(older, older.sequence + 1)\n", "an older version that is accepted gets a number of its own"),
    Mutant(_FILES, "        return next((path for path in places if self.holds(path, record)), None)\n", "        return next((path for path in places if path.exists()), None)\n", "a record is only written for a file that is that version"),
    Mutant(_FILES, "    return max(records, key=lambda record: record.latest_sequence, default=None)\n", "    return next(iter(records), None)\n", "the record of the newest version counts, not the first that reads"),
    Mutant(_FILES, "            was_durable = marked is not None and marked.published == latest\n", "            was_durable = False\n", "a version that was durable is not taken back"),
    Mutant(_FILES, "            self._mark_at_least(versions, repairs)\n", "            pass\n", "a mark that is behind is raised"),
    Mutant(_FILES, "            if path.exists() and not any(self.holds(path, version) for version in (newest, *earlier)):\n", "            if False:\n", "a damaged backup beside an older record is kept"),
    Mutant(_FILES, "            if record.damage is not None:\n", "            if False:\n", "a damaged record is kept where the mark brings it back"),
    Mutant(_FILES, "        for path in self.marks_staging.glob", "        for path in self.staging.glob", "a mark's temporary file that a killed process left is removed"),
    Mutant(_PUBLISHED, "            if partition.holds(partition.slot(number), version):\n                yield", "            if True:\n                yield", "rows are taken from earlier versions that verify alone"),
    Mutant(_IO, "            partitions.refuse_put_back(key)\n", "            pass\n", "nothing is made from a partition that was put back"),
    Mutant(_STATES, "        if finished and (refusal := Refusal.read(asset.partition(state.key), finished)) is not None:\n", "        if finished:\n", "rows are refused only where a check refused them"),
    Mutant(_FILES, '            if content["key"] != key:\n', "            if False:\n", "another partition's record is not read as this one's"),
)  # fmt: skip
