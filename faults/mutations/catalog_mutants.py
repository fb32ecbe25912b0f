"""The safeguards of the catalogue, each to be taken out once: file, exact text, replacement, promise.

The tests that hold the safeguards of a file stand beside it in ``TESTS``.
"""

from __future__ import annotations

from faults.mutations.mutant import Mutant

_CATALOG = "vlm_catalog"
_KILLED = "tests/faults/vlm_assets/test_ingest_killed.py"

_COPIES = f"{_CATALOG}/catalog_copies.py"
_FILE = f"{_CATALOG}/catalog_file.py"
_READER = f"{_CATALOG}/catalog.py"
_WITHDRAWN = f"{_CATALOG}/withdrawn_ids.py"
_STORED = f"{_CATALOG}/stored_catalog.py"
_CHOSEN = f"{_CATALOG}/chosen_catalog.py"
_PUBLISHED = f"{_CATALOG}/published_ids.py"
_LISTED = f"{_CATALOG}/listed_images.py"
_INGEST = f"{_CATALOG}/ingest.py"
_ROOT = f"{_CATALOG}/image_root.py"


def _unit(*names: str) -> list[str]:
    return [f"tests/unit/vlm_catalog/test_{name}.py" for name in names]


_OLDER = f"{_unit('older_catalog')[0]}::test_an_older_catalogue_is_accepted_by_a_person_alone"
_MOVED = f"{_unit('catalog')[0]}::test_a_home_can_be_moved_with_its_images"
_LOST = f"{_unit('old_catalog')[0]}::test_a_home_that_lost_its_catalogue_keeps_its_id"

TESTS = {
    _COPIES: [*_unit("old_catalog", "catalog_copies", "stored_catalog", "ingest"), _OLDER, _KILLED],
    _FILE: _unit("catalog", "catalog_copies", "tail", "withdrawn_ids"),
    _READER: _unit("catalog", "catalog_copies"),
    _WITHDRAWN: _unit("withdrawn_ids", "catalog_copies"),
    _STORED: _unit("stored_catalog"),
    _CHOSEN: _unit("old_catalog", "older_catalog"),
    _PUBLISHED: _unit("older_catalog", "withdrawn_ids"),
    _LISTED: _unit("ingest", "skip_bad"),
    _INGEST: [*_unit("ingest", "tail", "withdrawn_ids", "older_catalog"), _MOVED, _LOST],
    _ROOT: _unit("image_root", "ingest"),
}

MUTANTS = (
    # What is read, and which of the two copies is believed.
    Mutant(_COPIES, "    if files.problem is None and files.is_marked:\n        return files.catalog\n", "    if files.problem is None:\n        return files.catalog\n",
           "a catalogue's mark that is behind is raised by who opens it"),
    Mutant(_COPIES, "        if files.problem is None:\n            # Only the mark", "        if False:\n            # Only the mark",
           "a disk that cannot be written stops no reader of the catalogue"),
    Mutant(_COPIES, "        is_alike = sha256_of(path) == sha256_of(second_copy)\n", "        is_alike = True\n", "the regular look compares both copies of the catalogue"),
    Mutant(_COPIES, "        if is_alike and files.problem is None and files.is_marked:\n", "        if is_alike and files.problem is None:\n",
           "the regular look raises a mark of the catalogue that is behind"),
    Mutant(_COPIES, "                _raise_mark(home, files.catalog)  # Both", "                pass  # Both", "the regular look writes a lost copy of the catalogue's mark again"),
    Mutant(_COPIES, "                set_aside(second_copy, quarantine(home), keep=True)\n            _replace", "                pass\n            _replace",
           "a second copy of the catalogue that is damaged is kept aside"),
    Mutant(_COPIES, "wholly=damage is not None", "wholly=False", "a reader that met damage has every row of the catalogue read"),
    Mutant(_COPIES, "        if doubt is not None and not (_is_alike(header, copy) and problem is None):\n", "        if doubt is not None and problem is not None:\n",
           "without a mark that reads two catalogues that differ are not believed"),
    Mutant(_COPIES, "        return not self.is_disputed and _standing", "        return _standing", "a copy of the catalogue's mark that is another home's is written over"),
    Mutant(_COPIES, "not isinstance(self.copy, CatalogHeader) or _problem(self.copy, self.mark) is not None:\n            return False\n",
           "not isinstance(self.copy, CatalogHeader):\n            return False\n", "a second copy that the mark refuses takes no catalogue's place"),
    Mutant(_COPIES, "        return is_of_this_home and self.copy.sequence > self.header.sequence\n", "        return self.copy.sequence > self.header.sequence\n",
           "another home's second copy takes no catalogue's place"),
    Mutant(_COPIES, "        return is_of_this_home and self.copy.sequence > self.header.sequence\n", "        return is_of_this_home\n",
           "of two catalogues with one number none takes the other's place"),
    Mutant(_COPIES, "        if copy.catalog_id != header.catalog_id:\n", "        if False:\n", "beside a second copy of another home nothing is believed without a mark"),
    Mutant(_COPIES, "        if copy.sequence > header.sequence:\n", "        if False:\n", "a killed ingest is finished from its second copy"),
    Mutant(_COPIES, "        if copy.sequence == header.sequence and _standing", "        if False and _standing", "two catalogues with one number are told apart"),
    Mutant(_COPIES, "        copy = _header_of(second_copy, wholly=True)\n", "        copy = _header_of(second_copy)\n", "every row of a second copy is read before it takes the catalogue's place"),
    Mutant(_COPIES, "            aside = set_aside(path, quarantine(home), keep=True) if path.exists() else None\n", "            aside = None\n", "the catalogue that a second copy replaces is kept aside"),
    Mutant(_COPIES, "        elif files.is_sound:\n", "        elif isinstance(header, CatalogHeader):\n", "what the mark refuses is not believed because its second copy is damaged"),
    Mutant(_COPIES, "            set_aside(second_copy, quarantine(home))\n", "            second_copy.unlink()\n", "a newer second copy that is damaged is kept aside"),
    Mutant(_COPIES, "    elif not _is_explained(home, header, files):\n", "    elif False:\n", "a mark of the catalogue that is lost is told"),
    Mutant(_COPIES, "    if files.mark is not None and (isinstance(copy, str) or _problem(copy, files.mark)):\n", "    if False:\n",
           "a kill while damaged or old catalogues are replaced alarms nobody"),
    Mutant(_COPIES, "    copy = _header_of(backup_paths(home)[0], wholly=True)\n    if files.mark", "    copy = files.copy\n    if files.mark", "a kill while catalogues with damaged rows are replaced alarms nobody"),
    Mutant(_COPIES, "    return isinstance(before, CatalogHeader) and _standing(before, files.mark) is MarkComparison.CURRENT\n", "    return False\n", "an ingest that is killed before its mark alarms nobody"),
    Mutant(_COPIES, "        # The note first: a process that dies after the repair would leave an alert unsent.\n        note_repair(home, notes[0][0], \" \".join(sentence for _, sentence in notes))\n    if takes_copy:\n        _replace(home, path, second_copy.read_bytes())\n", "        pass\n    if takes_copy:\n        _replace(home, path, second_copy.read_bytes())\n    if notes:\n        note_repair(home, notes[0][0], \" \".join(sentence for _, sentence in notes))\n", "a repair of the catalogue is noted before it is made"),
    # The mark.
    Mutant(_COPIES, "        return MarkComparison.OTHER\n    return compare", "        pass\n    return compare", "another home's catalogue is not newer, whatever its number"),
    Mutant(_COPIES, "    if reading.is_unreadable:\n        return None, f", "    if False:\n        return None, f", "a mark of the catalogue that cannot be read is not taken for none"),
    Mutant(_COPIES, "    if not _is_disputed(reading):\n", "    if True:\n", "of marks of two homes the higher one is not simply believed"),
    Mutant(_COPIES, "        own = recorded_catalogs(home) or in_both\n", "        own = in_both\n", "what is published says whose home it is"),
    Mutant(_COPIES, "        own = recorded_catalogs(home) or in_both\n", "        own = recorded_catalogs(home)\n", "a catalogue and its second copy say whose home it is where nothing is published"),
    Mutant(_COPIES, "    if len(own) != 1 and not in_both:\n", "    if False:\n", "marks of two homes stop where nothing says whose home it is"),
    Mutant(_COPIES, "    return (*trusted, *contradicting, *reading.marks)[0], None\n", "    return (*contradicting, *reading.marks)[0], None\n", "this home's own mark counts beside another home's"),
    Mutant(_COPIES, "    return (*trusted, *contradicting, *reading.marks)[0], None\n", "    return (*trusted, *reading.marks)[0], None\n", "where partitions name two homes a mark that contradicts the catalogue stops everything"),
    Mutant(_COPIES, "    with contextlib.suppress(OSError):\n        mark = _catalog(home).mark\n", "    with contextlib.nullcontext():\n        mark = _catalog(home).mark\n", "a mark that the disk refuses makes no failure of an ingest that is done"),
    Mutant(_COPIES, "        versions.append((mark.origin, mark.sequence))\n", "", "the mark says how new the newest catalogue was"),
    Mutant(_COPIES, "        return mark.origin if not ids or mark.origin in ids else None\n", "        return mark.origin\n", "no id of the catalogue is told where the mark contradicts its files"),
    Mutant(_COPIES, "            if own in (None, header.catalog_id):\n", "            if True:\n", "no command that a sentence names takes another home's catalogue"),
    Mutant(_COPIES, "    paths = (catalog_path(home), *backup_paths(home), *mark_copies(mark_path(home)))\n", "    paths = (catalog_path(home), *backup_paths(home))\n", "a home that lost its catalogue is no new home"),
    Mutant(_COPIES, "        return 0.0, _WAS_DAMAGED, f\"It was put back from its second copy; see {quarantine(home)}.\"\n", "        return None\n", "a note of a repair that cannot be read is told all the same"),
    # Publishing.
    Mutant(_COPIES, "        header = _header_to_publish(home, data)\n        if not path.exists():\n", "        header = read_header(pa.BufferReader(data))\n        if not path.exists():\n",
           "a catalogue of another home or an older one is not published"),
    Mutant(_COPIES, "        _replace(home, previous, before)\n", "", "the catalogue before the last change is kept"),
    Mutant(_COPIES, "            _replace(home, second_copy, data)\n            _replace(home, path, data)\n", "            _replace(home, path, data)\n            _replace(home, second_copy, data)\n",
           "a new catalogue has a second copy before it has its name"),
    Mutant(_COPIES, "        if isinstance(damage := _header_of(path, wholly=True), str):\n", "        if isinstance(damage := \"\", int):\n", "a catalogue that rotted keeps no newer one away"),
    Mutant(_COPIES, "        header = verify_file(pa.BufferReader(data))\n", "        header = read_header(pa.BufferReader(data))\n", "every row of a new catalogue is read before anything is written"),
    Mutant(_COPIES, "                _replace(home, second_copy, before)\n            raise\n", "                pass\n            raise\n", "a catalogue that the disk refused does not stay as the second copy"),
    Mutant(_COPIES, "            raise\n        _raise_mark(home, header)\n", "            raise\n", "a new catalogue is marked when it is durable"),
    Mutant(_COPIES, "chosen or _header_to_publish(home, data), data)\n", "chosen or verify_file(pa.BufferReader(data)), data)\n", "only a person puts an older catalogue in place of what is damaged"),
    Mutant(_COPIES, "        if path.exists():\n            set_aside(path, quarantine(home), keep=True)\n    _publish", "        if False:\n            set_aside(path, quarantine(home), keep=True)\n    _publish",
           "catalogues that a person replaces are kept aside"),
    Mutant(_COPIES, "    _replace(home, catalog_path(home), data)\n    if _raise_mark(home, header) or second_copy.exists():\n        _replace(home, second_copy, data)\n", "    _replace(home, second_copy, data)\n    _replace(home, catalog_path(home), data)\n    _raise_mark(home, header)\n", "a second copy without a catalogue means that it was lost"),
    Mutant(_COPIES, "    if _raise_mark(home, header) or second_copy.exists():\n        _replace(home, second_copy, data)\n", "    _replace(home, second_copy, data)\n", "a first catalogue is marked before it is copied"),
    Mutant(_COPIES, "    if _raise_mark(home, header) or second_copy.exists():\n", "    if _raise_mark(home, header) or True:\n", "a first catalogue whose mark the disk refused alarms nobody"),
    Mutant(_COPIES, "    if _raise_mark(home, header) or second_copy.exists():\n", "    if _raise_mark(home, header):\n", "a second copy that a person replaced does not come back where the disk refuses the mark"),
    Mutant(_COPIES, "                if not _comes_after_files(home, header):\n", "                if True:\n", "two copies that rotted keep no newer catalogue away"),
    Mutant(_COPIES, "                if not _comes_after_files(home, header):\n", "                if False:\n", "no catalogue takes the place of damaged files that may be newer"),
    Mutant(_COPIES, "        other.catalog_id == header.catalog_id\n        and", "        True\n        and", "no catalogue takes the place of another home's damaged files"),
    Mutant(_COPIES, "        and (other.sequence < header.sequence or other.sha256 == header.sha256)\n", "        and other.sequence < header.sequence\n", "a version that rotted here is replaced by the same one"),
    Mutant(_COPIES, "        and (other.sequence < header.sequence or other.sha256 == header.sha256)\n", "        and other.sequence <= header.sequence\n", "of two catalogues with one number none replaces the other's damaged files"),
    Mutant(_COPIES, "    if lock is None:\n        raise DurableWriteError(", "    if lock is None:\n        yield\n        return\n        raise DurableWriteError(", "one process at a time writes the catalogue"),
    Mutant(_COPIES, "        for folder in (catalog.staging, catalog.marks_staging):\n", "        for folder in (catalog.marks_staging,):\n", "a catalogue's temporary file that a killed process left is removed"),
    Mutant(_COPIES, "        for folder in (catalog.staging, catalog.marks_staging):\n", "        for folder in (catalog.staging,):\n", "a temporary file of the catalogue's mark that a killed process left is removed"),
    # The file.
    Mutant(_FILE, "        if sha256.encode() != pairs.get(_HEADER_DIGEST_KEY):\n", "        if False:\n", "the catalogue's header is compared with its digest"),
    Mutant(_FILE, "            raise CatalogFormatError(str(error)) from None\n", "            raise ValueError(str(error)) from None\n", "a catalogue of a newer program is not taken for damage"),
    Mutant(_FILE, "            if property_range.start != stop:\n", "            if False:\n", "the catalogue's ranges follow each other without a gap"),
    Mutant(_FILE, "        if stop != footer.num_rows:\n", "        if False:\n", "the catalogue has as many rows as its ranges cover"),
    Mutant(_FILE, "    return verified_range(rows, property_range, digest)\n", "    return rows.replace_schema_metadata(None)\n", "the rows of a range are compared with its digest"),
    Mutant(_FILE, "    if table.schema not in (SCHEMA, _SCHEMA_1) or rows_digest", "    if rows_digest", "rows of other types are no rows of a catalogue"),
    Mutant(_FILE, "    _digest_integers(digest, pc.list_value_length(table[\"image_uris\"]))\n", "", "the digest of a range covers whose images are whose"),
    Mutant(_FILE, "    _digest_integers(digest, pc.fill_null(pc.list_flatten(table[\"image_bytes\"]), -1))\n", "", "the digest of a range covers the sizes of the images"),
    Mutant(_FILE, "        _digest_strings(digest, table[\"inputs_digest\"])\n", "        pass\n", "the digest of a range covers the digests of the inputs"),
    Mutant(_FILE, "f\"{uri}\\0{size}\\0\"", "f\"{uri}\\0\"", "another photo under the same name is another input"),
    Mutant(_FILE, "use_dictionary=False, write_page_checksum=True\n", "use_dictionary=False\n", "the catalogue's page checksums are written"),
    Mutant(_FILE, " and len(property_id) == len(WITHDRAWN) + 1 + DIGITS\n", "\n", "a property whose id begins like a tombstone is no withdrawn one"),
    # Its reader.
    Mutant(_READER, "        if not 0 <= ordinal < self.rows:\n", "        if not ordinal < self.rows:\n", "no ordinal is counted from the end"),
    Mutant(_READER, "        if position < 0 or self.ranges[position] != property_range:\n", "        if position < 0:\n", "a key of another catalogue finds no rows"),
    Mutant(_READER, "            if (property_range, digest) not in now.slices(with_tail=True):\n", "            if False:\n", "a range that changed while it was in use is named, and not called damaged"),
    Mutant(_READER, "            if CatalogHeader.from_footer(file.metadata) != self.header:\n", "            if False:\n", "a catalogue that changed while all of it is read is named, and not called damaged"),
    Mutant(_READER, "islice(self._stream(count), done, None)", "self._stream(count)", "rows that were read before damage was met come once"),
    Mutant(_READER, "        if rows < self.rows:\n", "        if False:\n", "a column with too few rows is damage, and no id is missing"),
    Mutant(_READER, "            return counts[: self.rows].astype", "            return counts.astype", "who counts images counts the properties that the catalogue had when it was opened"),
    Mutant(_READER, "        return pq.ParquetFile(self.path, page_checksum_verification=True)\n", "        return pq.ParquetFile(self.path)\n", "a damaged column of ids finds nobody else's property"),
    Mutant(_READER, "        put_back(home, \"it is gone\" if gone else f\"{part} cannot be read ({error})\")\n", "        pass\n", "who reads a range puts a damaged catalogue back"),
    # The list of withdrawn ids.
    Mutant(_WITHDRAWN, "        return cls(secrets.token_bytes(32))\n", "        return cls(bytes(32))\n", "each home has a key of its own for withdrawn ids"),
    Mutant(_WITHDRAWN, "        return self.changes.get(self._digest(property_id), 0) % 2 == 1\n", "        return self._digest(property_id) in self.changes\n", "an id that is taken off the list comes in again"),
    Mutant(_WITHDRAWN, "            if (changes.get(digest, 0) % 2 == 1) is not withdrawn:\n", "            if True:\n", "who is withdrawn twice stays withdrawn"),
    Mutant(_WITHDRAWN, "                changes.setdefault(self._of_tombstone(property_id, count), 1)\n", "", "a tombstone on the list does not count as forgotten"),
    Mutant(_WITHDRAWN, "text = property_id if count < 3 else ", "text = property_id if count else ", "each withdrawal of an id leaves a tombstone of its own"),
    Mutant(_WITHDRAWN, "{**dict.fromkeys(digests, 1), **self.changes}", "{**self.changes, **dict.fromkeys(digests, 1)}", "the tombstones of a catalogue change no number on the list"),
    Mutant(_WITHDRAWN, "        if self.key != other.key:\n", "        if False:\n", "lists of withdrawn ids of two homes are not merged"),
    Mutant(_WITHDRAWN, "            changes[digest] = max(count, changes.get(digest, 0))\n", "            changes[digest] = count\n", "an older copy of the list takes no change back"),
    Mutant(_WITHDRAWN, "    with only_catalog_writer(home):\n        before = read_withdrawn(home)\n", "    if True:\n        before = read_withdrawn(home)\n", "one process at a time writes the list of withdrawn ids"),
    Mutant(_WITHDRAWN, "        withdrawn = withdrawn if before is None else withdrawn.merged(before)\n", "", "who was withdrawn meanwhile stays on the list"),
    Mutant(_WITHDRAWN, "                leftover.unlink()\n", "                pass\n", "a temporary file of the list that a killed process left is removed"),
    Mutant(_WITHDRAWN, "write_replacing(path, data, mode=0o600)", "write_replacing(path, data)", "nobody but the owner reads the list of withdrawn ids"),
    Mutant(_WITHDRAWN, "        if damaged:\n", "        if False:\n", "a list of withdrawn ids that cannot be read is not taken for none"),
    Mutant(_WITHDRAWN, "                withdrawn = save_withdrawn(home, remote if withdrawn is None else remote.merged(withdrawn))\n", "                withdrawn = save_withdrawn(home, remote)\n                withdrawn = remote\n",
           "a store's list takes nobody off this home's"),
    Mutant(_WITHDRAWN, "            store.put(_NAME, data, over=stored)\n", "            store.put(_NAME, data, over=store.head(_NAME))\n", "another machine's list is not overwritten in the store"),
    Mutant(_WITHDRAWN, "            continue  # Another", "            return withdrawn  # Another", "a machine that another was faster than takes its list in and tries again"),
    Mutant(_WITHDRAWN, "        if data is None or (stored is not None and hashlib.sha256(data).hexdigest() == stored.sha256):\n", "        if data is None or stored is not None:\n",
           "the store gets what was withdrawn here"),
    # The catalogue in a store.
    Mutant(_STORED, "    share_withdrawn(home, store)\n", "", "the list of withdrawn ids is shared before the catalogue"),
    Mutant(_STORED, "        _refuse_emptied(home, store)\n        return put_catalog(", "        return put_catalog(", "a store that was emptied is filled by a person alone"),
    Mutant(_STORED, "    if stored is not None:\n        note_store(home, store)\n", "", "a home remembers the store that its catalogue came from"),
    Mutant(_STORED, "        if (trouble := trouble_of(home, header)) is not None:\n            raise _with_stored", "        if False:\n            raise _with_stored", "a store's older catalogue does not replace a damaged one"),
    Mutant(_STORED, "    if local is not None and (contradiction := _contradiction(local, header, store)) is not None:\n", "    if False:\n", "a store's catalogue that does not come after the home's is not taken"),
    Mutant(_STORED, "    if local is not None and local.header.sha256 == header.sha256:\n", "    if False:\n", "a catalogue whose rows rotted contradicts no store that has the same version"),
    Mutant(_STORED, "        except CatalogUnreadableError:\n            replace_catalog(home, data)\n", "        except CatalogUnreadableError:\n            pass\n", "a store's whole catalogue replaces the same version where both copies of it rotted"),
    Mutant(_STORED, "    if local.catalog_id != header.catalog_id:\n", "    if False:\n", "another home's store is named as one"),
    Mutant(_STORED, "    if local.header.sequence < header.sequence:\n", "    if local.header.sequence <= header.sequence:\n", "of two catalogues with one number the store's is not taken"),
    Mutant(_STORED, "    if stored is not None and stored.sha256 != sha256_of(local_path):\n", "    if False:\n", "a store's catalogue that was not this home's is not written over"),
    Mutant(_STORED, "    if stored is None and not newest_here:\n", "    if False:\n", "a lost catalogue of a store comes back by a person's word alone"),
    Mutant(_STORED, "            store.get_whole(CATALOG_NAME, digest, most=MOST_BYTES)\n", "            pass\n", "a deep look reads the store's catalogue"),
    Mutant(_STORED, "    put_catalog(store, data, over=over)\n    publish_catalog(home, data)\n", "    publish_catalog(home, data)\n    put_catalog(store, data, over=over)\n", "a home is never ahead of its store"),
    Mutant(_STORED, "        return store.put(CATALOG_NAME, data, over=over)\n", "        return store.put(CATALOG_NAME, data, over=store.head(CATALOG_NAME))\n", "of two ingests at once the second changes nothing in the store"),
    Mutant(_STORED, "    store.prove()\n", "", "no catalogue goes into a store that honours no conditions"),
    Mutant(_STORED, "        if hashlib.sha256(data).hexdigest() != stored.sha256:\n", "        if False:\n", "a store's catalogue is compared with its checksum"),
    # A catalogue that a person names.
    Mutant(_CHOSEN, "    if versions and header.catalog_id not in versions:\n", "    if False:\n", "another home's catalogue is not put in place"),
    Mutant(_CHOSEN, "        versions = dict.fromkeys(recorded_catalogs(home), 0)\n", "        pass\n", "what is published says which catalogue a person may name"),
    Mutant(_CHOSEN, "        if newest > chosen.newest:\n", "        if False:\n", "a choice is not put over what came while a person decided"),
    Mutant(_CHOSEN, "        return verify_file(pa.BufferReader(data))\n", "        return CatalogHeader.from_footer(pq.read_metadata(pa.BufferReader(data)))\n", "every row of a catalogue is read before it is put in place"),
    Mutant(_CHOSEN, "            header = replace(header, sequence=max(chosen.newest, header.sequence) + 1)\n", "            header = replace(header, sequence=header.sequence + 1)\n", "an older catalogue that is accepted gets a number that nobody had"),
    Mutant(_CHOSEN, "            header = _verified(f\"{chosen.place}, renumbered,\", data)\n", "            header = CatalogHeader.from_footer(pq.read_metadata(pa.BufferReader(data)))\n", "a catalogue that got a new number is read before the store gets it"),
    Mutant(_CHOSEN, " or trouble_of(home, header) is not None:\n", ":\n", "a catalogue that was not believed gets a number of its own"),
    # What was published keeps its numbers.
    Mutant(_PUBLISHED, "        if published_ids.range.start < closed:\n", "        if False:\n", "a published range that lies across others stops an ingest"),
    Mutant(_PUBLISHED, "    if unlisted := unlisted_ids(home, catalog):\n", "    if False and (unlisted := []):\n", "no tail is closed over a published range"),
    Mutant(_PUBLISHED, "    if not published.verify(key).ok:\n        published.restore(key)\n", "", "a damaged file whose ids are asked for is put back first"),
    Mutant(_PUBLISHED, "        if by_ordinal.get(ordinal, id_) != id_ and not is_tombstone(id_):\n", "        if False:\n", "no property takes the number of a published one"),
    Mutant(_PUBLISHED, "    if missing := sorted(id_ for id_ in to_place.difference(new) if not is_tombstone(id_)):\n", "    if missing := list[str]():\n", "a listing that lacks published properties stops an ingest"),
    # Listings.
    Mutant(_LISTED, "        elif listing.row_is_property:\n", "        elif False:\n", "of a property that is listed twice the first entry stays"),
    Mutant(_LISTED, "                    refused.add(owners[at])\n", "                    pass\n", "a property with an image outside the root is left out whole"),
    Mutant(_LISTED, "                refused.add(code)\n                continue\n            block", "                continue\n            block", "a property with a bad path is left out whole"),
    Mutant(_LISTED, "        keep[at] = False\n", "", "an image that is listed twice is taken once"),
    Mutant(_LISTED, "    kept.left_out = frozenset(names[code] for code in refused)\n", "", "a known property with a bad entry is not called gone"),
    # Ingest.
    Mutant(_INGEST, "        restored = [restore_withdrawn(home)]\n", "        restored = [None]\n", "an ingest restores the list of withdrawn ids"),
    Mutant(_INGEST, "            stack.close()  # A person", "            pass  # A person", "nobody waits for an ingest that asks a person"),
    Mutant(_INGEST, "            if _standing(home, store) != before:\n", "            if False:\n", "a catalogue that came while a person was asked is not written over"),
    Mutant(_INGEST, "            save_withdrawn(home, merge.withdrawn)\n", "            pass\n", "a list that forgot is completed from the tombstones"),
    Mutant(_INGEST, "            check_copies(home)\n", "            pass\n", "an ingest that changes nothing leaves a whole second copy"),
    Mutant(_INGEST, "    if changes_roots and merge.gone and not (merge.unchanged or merge.changed):\n", "    if False:\n", "an update with other properties elsewhere takes no image away"),
    Mutant(_INGEST, "    if merge.tombstones and merge.withdrawn is None:\n", "    if False:\n", "without the list of withdrawn ids nothing is ingested"),
    Mutant(_INGEST, "    if merge.update and merge.readable_before and images and", "    if False and", "a disk that is not mounted makes no range stale"),
    Mutant(_INGEST, "        refuse_unlisted(home, current)\n", "", "an older catalogue's tail is not closed"),
    Mutant(_INGEST, "            is_new[codes[codes >= 0]] = False\n", "", "an ordinal is given once"),
    Mutant(_INGEST, "                if is_new[code] and name in self.withdrawn:\n", "                if False:\n", "a withdrawn property stays out of the next ingest"),
    Mutant(_INGEST, "            name for published in self.unlisted for name in published.ids if is_tombstone(name)\n", "            name for name in ()\n", "a published tombstone is on the list"),
    Mutant(_INGEST, "        unfilled = unfilled and cut[-1] not in published_ranges\n", "", "a smaller range that is published does not become the tail"),
    Mutant(_INGEST, "        unlisted = unlisted_ids(home, current, store)\n", "        unlisted: list[PublishedIds] = []\n", "an ingest numbers as the published files do"),
    Mutant(_INGEST, "known_tail.since if known_tail is not None and tail.start < rows else time.time()", "time.time()", "the tail waits from its first property on"),
    Mutant(_INGEST, "            digests[row] = inputs_digest(*now)\n", "            digests = [inputs_digest(*of) for of in [now] * len(digests)]\n", "a changed image list costs one property"),
    Mutant(_INGEST, "            digests[row] = inputs_digest(*now)\n", "", "a changed image list is another input"),
    Mutant(_INGEST, " and not is_tombstone(name)]\n", "]\n", "no withdrawn property is called gone"),
    Mutant(_INGEST, "    if lock is None:\n        holder", "    if False:\n        holder", "one ingest at a time"),
    Mutant(_INGEST, "            id_before or str(uuid.uuid4()),\n", "            str(uuid.uuid4()),\n", "a home that lost its catalogue keeps its id"),
    Mutant(_INGEST, "    if request.update and len(before) == len(named):\n", "    if request.update:\n", "an update takes no image root away"),
    Mutant(_INGEST, "        if isinstance(place, Path) and place.is_relative_to(home.absolute())\n", "        if False\n", "a home moves with its images"),
    # The image roots.
    Mutant(_ROOT, "        if \"..\" in written.split(\"/\"):\n            written = self._resolved(f\"{self.real}/{written}\")\n", "", "no listed path leaves the image root by dots"),
    Mutant(_ROOT, "            else:\n                written = self._resolved(written)\n", "            else:\n                written = written.lstrip(\"/\")\n", "no absolute path leaves the image root"),
    Mutant(_ROOT, "    return root.rstrip(\"/\") + \"/\"\n", "    return root.rstrip(\"/\")\n", "a folder whose name begins alike is outside the image root"),
    Mutant(_ROOT, "        if not f\"{real}/\".startswith(_within(self.real)):\n", "        if False:\n", "no link leads out of the image root"),
    Mutant(_ROOT, "real if f\"{real}/\".startswith(_within(self.real)) else None", "real", "no linked folder leads out of the image root"),
    Mutant(_ROOT, "            if stat.S_ISLNK(status.st_mode):\n                status = self.locate(uri).stat()\n", "            if stat.S_ISLNK(status.st_mode):\n                status = os.stat(f\"{real_folder}/{name}\")\n", "no linked image leads out of the image root"),
    Mutant(_ROOT, "        if not stat.S_ISREG(status.st_mode):\n", "        if False:\n", "a folder or a device is no image"),
    Mutant(_ROOT, "        check_text(uri)\n        return Path", "        return Path", "a URI with a NUL byte is refused where it is read"),
    Mutant(_ROOT, "            if not written.startswith(start := self.folder.address(\"\")):\n", "            if not written.startswith(str(start := self.folder.address(\"\"))[:-1]):\n", "a neighbour on S3 whose name begins alike is outside"),
    Mutant(_ROOT, " or not {\".\", \"..\"}.isdisjoint(written.split(\"/\")):\n", ":\n", "no address on S3 has dots that may lead out"),
    Mutant(_ROOT, "        return self.folder.address(self.uri(uri))\n", "        return self.folder.address(uri)\n", "a URI of the catalogue may not lead out of the folder on S3"),
    Mutant(_ROOT, "        if len(positions) > 1:\n", "        if False:\n", "a path that fits two image roots is refused"),
    Mutant(_ROOT, " or not 2 <= int(number) <= len(self.roots) or not rest:\n", " or not rest:\n", "a URI names no image root that the catalogue lacks"),
    Mutant(_ROOT, "            raise ImageOutsideRootError(f\"it lies in none of {self.path}\")\n", "            return _numbered(0, written.lstrip(\"/\"))\n", "of several image roots a path may leave none"),
)  # fmt: skip
