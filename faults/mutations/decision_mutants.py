"""Decisions outside the commit protocol, each to be changed once: file, exact text, replacement, promise.

What lives here: what is tried again, found, given on, judged, compared, planned, leased and refused. The
tests that hold the decisions of a file stand beside it in ``TESTS``.
"""

from __future__ import annotations

from faults.mutations.mutant import Mutant

_RETRY = "sensors/retry_decision.py"
_FAILED = "sensors/failed_partitions.py"
_OUTLOOK = "sensors/outlook.py"
_JUDGE = "sensors/progress_judge.py"
_END = "sensors/run_end.py"
_SEARCH = "vlm_results/search.py"
_EXPORT = "vlm_results/export.py"
_ROWS = "vlm_results/exported_rows.py"
_TABLE = "vlm_results/published_table.py"
_JOINED = "vlm_results/joined_rows.py"
_CHANGES = "vlm_results/changes.py"
_DESCRIBED = "vlm_results/described_table.py"
_REVIEW = "vlm_results/review.py"
_IMAGES = "vlm_results/exported_images.py"
_QUALITY = "vlm_results/quality.py"
_CONFIDENCES = "vlm_results/confidence_statistics.py"
_GUARANTEE = "vlm_results/guarantee.py"
_CERTIFICATION = "vlm_results/certification.py"
_LABELS = "vlm_results/labels.py"
_WHERE = "vlm_assets/config/where.py"
_FILLED = "vlm_assets/config/filled_fields.py"
_CHECKS = "vlm_assets/assets/checks.py"
_FINGERPRINT = "vlm_assets/assets/fingerprint.py"
_INTERVALS = "vlm_assets/services/intervals.py"
_COMPARE = "vlm_assets/services/comparison.py"
_SECOND_OPINION = "vlm_assets/services/second_opinion.py"
_FORECAST = "vlm_assets/services/forecast.py"
_PACE = "vlm_assets/services/pace.py"
_LEASES = "vlm_engine/devices/leases.py"
_PROCESSES = "vlm_durable/files/processes.py"
_ORDER = "vlm_training/order.py"
_LOOP = "vlm_training/loop.py"
_SCHEMA = "vlm_engine/schema.py"
_CANARY = "vlm_engine/canary.py"
_CONFIDENCE = "vlm_engine/confidence.py"
_TOKEN_SCORES = "vlm_engine/transformers/token_scores.py"
_LEFT_OUT = "vlm_engine/devices/left_out.py"
_STATE = "vlm_durable/state/database.py"
_STATE_TABLES = "vlm_durable/state/tables.py"
_STATE_FILE = "vlm_durable/state/sqlite_file.py"
_MODEL = "vlm_training/published_model.py"
_KEPT_TRAININGS = "vlm_training/kept_trainings.py"
_LEARNED = "vlm_assets/assets/learned_labels.py"
_VARIANTS = "vlm_training/variants.py"
_VERSIONED = "vlm_durable/versions/versioned_object.py"
_MARKS = "vlm_durable/versions/version_mark.py"
_ENGINE_CHOICE = "vlm_assets/config/engine_choice.py"
_DESCRIBED_ASSETS = "vlm_assets/assets/property_descriptions.py"
_JOINED_SETS = "vlm_assets/assets/joined_sets.py"
_PARTITION = "vlm_assets/assets/partition.py"
_MATERIALIZE = "vlm_assets/assets/materialize.py"
_QUESTION_SETS = "vlm_assets/config/question_sets.py"
_QUESTIONS_FILE = "vlm_assets/config/questions_file.py"
_FURTHER = "vlm_assets/services/further_questions.py"
_KEPT = "vlm_assets/services/kept_assets.py"
_WITHDRAWAL = "vlm_assets/services/withdrawal.py"
_BACKFILL = "vlm_assets/services/backfill.py"
_STALE = "vlm_assets/services/stale_work.py"

_WITHDRAWN_LABELS = "tests/integration/vlm_assets/services/test_withdrawal.py::test_no_list_of_labels_names_a_withdrawn_property"
_SETS = "tests/integration/vlm_assets/assets/test_joined_sets.py::test_"
_REMOVED_SETS = "tests/unit/vlm_assets/services/test_removed_sets.py"
_STORED_SETS = "tests/integration/vlm_assets/services/test_store_contents.py::test_a_question_set_that_only_the_store_has_is_looked_at_and_withdrawn_from"
_MATERIALIZATION = "tests/integration/vlm_assets/assets/test_materialize.py::test_"

TESTS = {
    _RETRY: ["tests/unit/sensors/test_retry_decision.py"],
    _FAILED: ["tests/unit/sensors/test_failed_partitions.py"],
    _OUTLOOK: ["tests/unit/sensors/test_outlook.py"],
    _JUDGE: ["tests/unit/sensors/test_progress_judge.py"],
    _END: ["tests/unit/sensors/test_run_end.py"],
    _SEARCH: ["tests/unit/vlm_results/test_search.py"],
    _EXPORT: [
        f"tests/unit/vlm_results/{name}"
        for name in (
            "test_export.py::test_a_vector_is_given_on_with_the_text_that_it_was_made_from_alone",
            "test_export.py::test_a_shard_that_is_not_what_was_written_ends_the_export",
            "test_export.py::test_more_rows_than_were_chosen_end_the_export",
            "test_export.py::test_nothing_says_that_a_folder_is_whole_while_its_shards_are_replaced",
            "test_export.py::test_no_cell_of_a_csv_is_a_formula",
            "test_exported_images.py::test_an_image_that_is_back_is_tried_once_more_and_the_rest_is_kept",
            "test_exported_images.py::test_a_copy_that_is_gone_or_left_over_is_put_right",
        )
    ],
    _ROWS: [
        f"tests/unit/vlm_results/test_export.py::test_{name}"
        for name in (
            "each_row_gets_its_own_vector_whatever_order_they_lie_in",
            "a_partition_that_is_published_beside_a_condition_is_chosen_from_anew",
            "a_condition_that_chooses_other_rows_of_the_same_file_writes_its_shard_anew",
        )
    ],
    _TABLE: [
        "tests/unit/vlm_results/test_export.py::test_a_vector_is_given_on_with_the_text_that_it_was_made_from_alone",
        "tests/unit/vlm_results/test_calibration.py::test_a_label_is_of_what_made_the_answer_that_was_read",
    ],
    _JOINED: ["tests/unit/vlm_results/test_joined_rows.py", "tests/unit/vlm_results/test_filled_fields.py"],
    _DESCRIBED: [
        f"tests/unit/vlm_results/test_described_table.py::test_{name}"
        for name in (
            "new_descriptions_wait_for_their_vectors",
            "nothing_of_a_withdrawn_property_is_left_on_the_disk",
            "another_folder_forgets_with_its_next_run",
            "a_lost_file_is_written_again_and_a_lost_table_is_not_guessed",
        )
    ],
    _REVIEW: ["tests/unit/vlm_results/test_taken_verdicts.py"],
    _CHANGES: ["tests/unit/vlm_results/test_changes.py"],
    _IMAGES: ["tests/unit/vlm_results/test_exported_images.py"],
    _QUALITY: [
        f"tests/unit/vlm_results/test_quality.py::test_{name}"
        for name in (
            "many_odd_partitions_are_found_together_that_one_by_one_would_pass_for_chance",
            "odd_by_a_little_is_not_named_however_sure_it_is",
            "the_chance_of_a_partition_is_a_chance",
            "a_few_rows_are_not_held_against_a_partition",
            "the_share_of_false_alarms_is_the_one_that_is_set",
        )
    ],
    _CONFIDENCES: ["tests/unit/vlm_results/test_confidence_statistics.py"],
    _GUARANTEE: ["tests/unit/vlm_results/test_guarantee.py"],
    _CERTIFICATION: ["tests/unit/vlm_results/test_guarantee.py"],
    _LABELS: ["tests/unit/vlm_results/test_calibration.py", "tests/unit/vlm_results/test_filled_fields.py"],
    _WHERE: ["tests/unit/vlm_assets/config/test_where.py"],
    _FILLED: ["tests/unit/vlm_results/test_filled_fields.py"],
    _CHECKS: [
        "tests/unit/vlm_assets/assets/test_checks.py",
        "tests/integration/vlm_assets/assets/test_asked_where.py",
    ],
    _FINGERPRINT: ["tests/integration/vlm_assets/assets/test_asked_where.py"],
    _INTERVALS: ["tests/unit/vlm_assets/services/test_intervals.py"],
    _COMPARE: ["tests/unit/vlm_assets/services/test_comparison.py"],
    _SECOND_OPINION: ["tests/unit/vlm_assets/services/test_second_opinion.py"],
    _FORECAST: ["tests/unit/vlm_assets/services/test_forecast.py"],
    _PACE: ["tests/unit/vlm_assets/services/test_forecast.py"],
    _LEASES: ["tests/unit/vlm_engine/devices/test_leases.py"],
    _PROCESSES: [
        "tests/unit/vlm_durable/files/test_processes.py",
        "tests/unit/vlm_engine/images/test_worker.py",
    ],
    _ORDER: ["tests/unit/vlm_training/test_order.py"],
    _LOOP: ["tests/unit/vlm_training/test_loop.py"],
    _SCHEMA: ["tests/unit/vlm_assets/assets/test_truth.py"],
    _CANARY: ["tests/unit/vlm_engine/test_canary.py"],
    _CONFIDENCE: ["tests/unit/vlm_engine/test_confidence.py"],
    _TOKEN_SCORES: ["tests/unit/vlm_engine/transformers/test_token_scores.py"],
    _LEFT_OUT: ["tests/unit/vlm_engine/test_canary.py"],
    _STATE: ["tests/unit/vlm_durable/state/test_database.py"],
    _STATE_TABLES: ["tests/unit/vlm_durable/state/test_database.py"],
    _STATE_FILE: ["tests/unit/vlm_durable/state/test_database.py"],
    _MODEL: ["tests/unit/vlm_training/test_description_model.py"],
    _KEPT_TRAININGS: [_WITHDRAWN_LABELS],
    _LEARNED: [_WITHDRAWN_LABELS],
    _VARIANTS: ["tests/unit/vlm_training/test_variants.py"],
    _VERSIONED: ["tests/unit/vlm_training/test_variants.py"],
    _MARKS: ["tests/unit/vlm_durable/versions/test_version_mark.py"],
    _ENGINE_CHOICE: ["tests/unit/vlm_training/test_description_model.py"],
    _DESCRIBED_ASSETS: [f"{_SETS}each_set_has_the_options_that_are_its_own"],
    _JOINED_SETS: [
        f"{_SETS}{name}"
        for name in (
            "a_refused_set_keeps_no_other_from_being_published",
            "a_set_that_is_stopped_half_way_is_asked_no_more_and_the_other_goes_on",
            "a_journal_that_cannot_be_written_loses_no_row_of_the_other",
            "a_journal_that_cannot_be_read_keeps_no_other_set_from_being_published",
            "answers_that_no_device_may_give_are_held_against_it_whichever_set_has_them",
            "a_set_that_only_waits_to_publish_does_not_stand_still_while_another_is_asked",
            "a_pause_loses_no_row_of_a_batch_that_both_were_asked",
            "each_failure_of_a_run_is_told",
        )
    ],
    _PARTITION: [
        "tests/unit/vlm_assets/assets/test_partition.py",
        f"{_SETS}two_sets_of_a_run_are_asked_together_and_both_published",
        f"{_MATERIALIZATION}a_recomputation_of_days_ago_is_re_executed_after_another_one",
        f"{_MATERIALIZATION}other_settings_are_another_generation_and_the_old_one_is_kept",
    ],
    _MATERIALIZE: [
        f"{_MATERIALIZATION}{name}"
        for name in (
            "recompute_is_done_once_however_often_its_run_is_retried",
            "a_run_that_was_not_told_leaves_what_is_stale",
            "a_failed_check_publishes_nothing_and_says_what_to_do",
            "work_that_ends_early_is_resumed_and_no_content_check_is_blamed",
        )
    ],
    _QUESTION_SETS: [
        "tests/unit/vlm_assets/config/test_question_sets.py",
        f"{_SETS}each_set_has_the_options_that_are_its_own",
    ],
    _QUESTIONS_FILE: ["tests/unit/vlm_assets/config/test_question_sets.py"],
    _FURTHER: ["tests/integration/vlm_assets/services/test_further_questions.py"],
    _KEPT: [_REMOVED_SETS, _STORED_SETS],
    _WITHDRAWAL: [_REMOVED_SETS, _STORED_SETS],
    _BACKFILL: ["tests/unit/vlm_assets/services/test_backfill.py"],
    _STALE: ["tests/unit/vlm_assets/services/test_stale_work.py"],
}

MUTANTS = (
    Mutant(_CONFIDENCE, 'return _Value(start, end + 1, "number")', 'return _Value(start, end, "number")', "the end of a number counts"),
    Mutant(_CONFIDENCE, " and option[place - start] not in _CONTINUES_NUMBER", "", "a longer number is another number"),
    Mutant(_CONFIDENCE, "        elif parts_at < value.start:\n            before += probability\n", "",
           "what parts from an answer before a value says nothing of it"),
    Mutant(_CONFIDENCE, "start + (not field.nullable)", "start", "the mark that opens a text is no word of it"),
    Mutant(_CONFIDENCE, 'answer != text.encode("utf-8", "surrogatepass")', "False", "tokens of another text give no confidence"),
    Mutant(_TOKEN_SCORES, "_UNKNOWN in numbers[: len(answer)]", "_UNKNOWN in numbers", "what comes after an answer's end is not its own"),
    Mutant(_TOKEN_SCORES, "            self._held[-1].chosen = [chosen[row] for row in self._held[-1].rows]\n",
           "            self._held[-1].chosen = list(chosen[: len(self._held[-1].rows)])\n", "each row has the token that was chosen for it"),
    Mutant(_LEARNED, "        write_replacing(path, left.to_bytes())\n    return left", "        pass\n    return left",
           "a withdrawal leaves no digest of a learned label"),
    Mutant(_LEARNED, "self.withdrawn is not None and self.withdrawn.was_ever(property_id)", "False",
           "a property that was withdrawn and taken in again counts as learned"),
    Mutant(_KEPT_TRAININGS, "            model.record_changed(LEARNED_LABELS)\n", "", "a model whose list a withdrawal changed is the newest still"),
    Mutant(_MODEL, "records = (*self._standing(), marked)", "records = self._standing()", "the mark tells that a model is older"),
    Mutant(_MODEL, "        self.mark.write(self._mark(record))\n", "", "a published model is marked"),
    Mutant(_MODEL, "known if is_known else self.mark.next_sequence(known)", "self.mark.next_sequence(known)",
           "a model that is made again keeps its number"),
    Mutant(_MODEL, "        self.mark.raise_to(self._mark(record))\n", "", "a lost mark of a model is written anew"),
    Mutant(_MODEL, "        if any(copy.record != record for copy in self.copies()):\n", "        if False:\n",
           "a lost record of a model is written anew"),
    Mutant(_MODEL, "        if not is_known and newest and (", "        if newest and (", "a model that is made again leaves the one before it"),
    Mutant(_MODEL, "newest is None or self.is_whole(newest, digest", "newest is None or newest[\"sequence\"] in standing or self.is_whole(newest, digest",
           "an older folder beside the newest record of a model describes nothing"),
    Mutant(_MODEL, "if not known and (reading.is_unreadable or ", "if not known and (", "a damaged mark of a model is not taken for none"),
    Mutant(_MODEL, " or any(copy.damage is not None for copy in self.copies())", "", "a damaged record of a model is not taken for none"),
    Mutant(_MODEL, "        if newest is None:\n            self._set_aside_unknown(record)\n", "", "a model without a record is kept aside"),
    Mutant(_MODEL, 'record.get("name", self.mark.name)', "self.mark.name", "the record of another model is damage"),
    Mutant(_VARIANTS, "if problem := unfit_key(name):", "if problem := None:", "no two variants share a file"),
    Mutant(_VERSIONED, "if problem := unfit_key(paths.key):", "if problem := None:", "no two objects share a file"),
    Mutant(_MARKS, "int(time.time()) if reading.is_unreadable else 0", "0", "no number is given twice where a mark cannot be read"),
    Mutant(_MARKS, "unknown if reading.is_unreadable else reading.mark", "reading.mark", "a loss that is accepted gives no number twice"),
    Mutant(_ENGINE_CHOICE, "trouble = extension.model_trouble(settings, name)", "trouble = None", "an older model describes nothing"),
    Mutant(_RETRY, "entry.attempts + (not interrupted)", "entry.attempts + 1", "an interruption is no attempt"),
    Mutant(_RETRY, "    attempts = 0 if progress else ", "    attempts = ", "a new row begins the count of attempts anew"),
    Mutant(_RETRY, "entry.interruptions + 1 if interrupted else 0", "entry.interruptions + interrupted",
           "a failure ends the row of interruptions"),
    Mutant(_RETRY, "    if progress:\n        interruptions", "    if False:\n        interruptions", "a new row ends the row of interruptions"),
    Mutant(_RETRY, "given_up=entry.given_up and not progress", "given_up=entry.given_up", "a new row brings back what was given up"),
    Mutant(_RETRY, "entry.attempts >= policy.attempts", "entry.attempts > policy.attempts", "it is given up after so many attempts"),
    Mutant(_RETRY, "if run is None or run.run_id == entry.reckoned:", "if run is None:", "the end of a run is counted once"),
    Mutant(_RETRY, "now < entry.not_before <= now + policy.delay(_LONGEST_DOUBLINGS)", "now < entry.not_before", "a clock that was put back holds nothing up"),
    Mutant(_RETRY, "2 ** min(times, _LONGEST_DOUBLINGS)", "2**times", "a back-off has an end"),
    Mutant(_RETRY, "max(interruptions - 1, 0) if interrupted else attempts", "attempts", "interruptions back off by their own number"),
    Mutant(_RETRY, "    delay = 0.0 if interrupted and interruptions <= 1 else ", "    delay = ", "the first interruption is resumed at once"),
    Mutant(_RETRY, "facts.for_person is not None and not at_once", "False", "what a new start would repeat is left to a person"),
    Mutant(_RETRY, "abs(now - (run.ended_at or now)) < _DAGSTER_SECONDS", "True", "a run that Dagster never retries is not left to it"),
    Mutant(_RETRY, "attempts=0, given_up=False, not_before=0.0", "attempts=0, not_before=0.0", "a person's button takes it up again"),
    Mutant(_FAILED, "                self.entries[key] = self._with_why(decision.entry)\n            return decision\n", "                pass\n            return decision\n",
           "what a person's button has no room for is tried later"),
    Mutant(_FAILED, "pause.sentence()}.\", is_void=True)", "pause.sentence()}.\")", "a person's button that is pressed in a pause is answered after it"),
    Mutant(_OUTLOOK, 'storable_text(_shortened(" ".join(error.split())).rstrip("."))', '_shortened(" ".join(error.split())).rstrip(".")',
           "an error that no database can hold stops no retry"),
    Mutant(_JUDGE, "        if not reading.is_paced:\n", "        if False:\n", "what loads has its own time"),
    Mutant(_JUDGE, "        if not reading.learned_seconds:\n            return self.most\n", "", "who has no rhythm yet has the longest time"),
    Mutant(_JUDGE, "max(self.learned_times * reading.learned_seconds, self.least)", "self.learned_times * reading.learned_seconds",
           "quick work is not ended for a moment"),
    Mutant(_JUDGE, "min(max(self.learned_times * reading.learned_seconds, self.least), self.most)",
           "max(self.learned_times * reading.learned_seconds, self.least)", "slow work is ended in the end"),
    Mutant(_JUDGE, "max(reading.moved, watched_since)", "reading.moved", "time that nobody watched ends nobody"),
    Mutant(_JUDGE, " if seconds > allowed_seconds else None", "", "who moves in time is left alone"),
    Mutant(_JUDGE, " if peer != name]", "]", "the slow one is not its own peer"),
    Mutant(_JUDGE, "(1.0 - SLOW_SHARE) * ", "", "a little slower is not slow"),
    Mutant(_JUDGE, "before.get(name, now) for", "now for", "slow for long is named in the end"),
    Mutant(_JUDGE, "at if at >= watched_since else now", "at", "who was slow before a gap begins anew"),
    Mutant(_END, "                dagster.mark_interrupted(run.run_id)\n", "                pass\n", "a run is fenced before it is told to end"),
    Mutant(_END, "                dagster.end_cancelled(run.run_id, _KILLED)\n", "                pass\n", "a cancel is written down before the kill"),
    Mutant(_END, "            return [f\"{run.who} {run.why}: it is not ended yet, because Dagster cannot be told ({error}).\"]\n",
           "            pass\n", "without a fence nothing is signalled"),
    Mutant(_END, "    dagster.mark_interrupted(run_id)\n    if job is not None:\n        dagster.stop_launcher_job(job)\n",
           "    if job is not None:\n        dagster.stop_launcher_job(job)\n    dagster.mark_interrupted(run_id)\n",
           "a run whose process is gone is fenced before its job is stopped"),
    Mutant(_END, "    if job is not None:\n        dagster.stop_launcher_job(job)\n    dagster.free_slots(run_id)\n",
           "    dagster.free_slots(run_id)\n    if job is not None:\n        dagster.stop_launcher_job(job)\n",
           "a job that waits cannot begin any more before its slot is free"),
    Mutant(_END, "    dagster.free_slots(run_id)\n    return dagster.report_end(run_id, why)\n",
           "    ended = dagster.report_end(run_id, why)\n    dagster.free_slots(run_id)\n    return ended\n",
           "what a run held is free when its end is told"),
    Mutant(_END, "kills = not is_first and waited >= self.grace", "kills = not is_first",
           "a run has the grace to commit"),
    Mutant(_END, "        if not is_first and not kills:\n            return []\n", "", "a second SIGTERM interrupts no commit"),
    Mutant(_END, "signal.SIGKILL if kills else signal.SIGTERM", "signal.SIGTERM", "who does not end is killed"),
    Mutant(_END, "watch.at - killed_at >= self.grace", "True", "a killed process has a moment to end before its device is left out"),
    Mutant(_END, "watch.killed.setdefault(key, watch.at)", "watch.ending[key]", "a kill that comes late is not one that was outlived"),
    Mutant(_END, "        if outlives_kill:\n", "        if False:\n", "a device whose process outlives SIGKILL is left out"),
    Mutant(_END, "        if run.kill_counts:\n", "        if True:\n", "a hang after the run is not held against the device"),
    Mutant(_END, "        except ControlStateError as error:\n            return [f\"{run.device} is", "        except ZeroDivisionError as error:\n            return [f\"{run.device} is",
           "a device that cannot be left out keeps no other run"),
    Mutant(_END, "        except ControlStateError as error:\n            return [f\"No alert", "        except ZeroDivisionError as error:\n            return [f\"No alert",
           "an alert that cannot be written keeps no process alive"),
    Mutant(_END, "        except PermissionError:\n", "        except ZeroDivisionError:\n", "another user's process keeps no other run"),
    Mutant(_END, "for key, signalled_at in (self._signalled | watch.ending).items()", "for key, signalled_at in dict(watch.ending).items()",
           "a tick that failed forgets nobody who was told to end"),
    Mutant(_END, " and not ProcessIdentity(int(pid), int(start), boot_id()).lives()", "", "who cannot be seen for a moment has not ended"),
    Mutant(_END, "by_key.setdefault(_key(run.run_id, run.process), run)", "by_key[str(len(by_key)) + _key(run.run_id, run.process)] = run",
           "who was found twice is told to end once"),
    Mutant(_SEARCH, "best = sorted([*best, *rows], reverse=True)[:most]", "best = rows[:most]",
           "the nearest of all partitions are kept"),
    Mutant(_SEARCH, "best = ranked[: limit + (like is not None)]", "best = ranked[:limit]", "as many neighbours as were asked for"),
    Mutant(_SEARCH, "    return sorted(best, reverse=True)[:most], scanned\n", "    return best[:most], scanned\n", "the nearest of all blocks are kept"),
    Mutant(_SEARCH, "[part / max(float(np.linalg.norm(part)), 1e-12) for part in parts]", "parts",
           "a text and a property count alike"),
    Mutant(_SEARCH, " if ids[ordinal] != like]", "]", "a property is no neighbour of itself"),
    Mutant(_SEARCH, "            ordinals, scores = ordinals[allowed], scores[allowed]\n", "            pass\n", "only what is chosen is found"),
    Mutant(_SEARCH, "        ordinals = ordinals.filter(pc.is_valid(column))\n", "        pass\n", "a row without a vector shifts no other"),
    Mutant(_SEARCH, "nan=-1.0", "nan=1.0", "a vector without a direction is near to nothing"),
    Mutant(_SEARCH, "all(parts.get(name) == value for name, value in expected.items())", "True", "vectors of another model are left out"),
    Mutant(_SEARCH, "np.argpartition(-scores,", "np.argpartition(scores,", "the nearest of a block are kept"),
    Mutant(_TABLE, "if vectors_record is not None and not are_vectors_of(vectors_record, record):", "if False:",
           "a vector of another text is not given on"),
    Mutant(_TABLE, "published.record(key) == file.record:", "True:", "a label counts for the model that gave its answer"),
    Mutant(_JOINED, 'RAW if _has(of_set.rows, RAW) else "description"', '"description"', "a withheld answer lets no worse one through"),
    Mutant(_FILLED, "above), fillers, first)", "above), list(fillers)[::-1], first)", "the last set that fills a field gives its answer"),
    Mutant(_JOINED, "pc.if_else(is_same, at, pa.scalar(None, at.type))", "at", "a row under another id is not joined"),
    Mutant(_JOINED, 'return "".join((described.sha256, guarantee.version_of(described), *of_sets))',
           "return described.sha256 + guarantee.version_of(described)", "words follow every question set"),
    Mutant(_EXPORT, ' and note["sources"] == sources', "", "a shard of earlier rows is written anew"),
    Mutant(_EXPORT, " and _is_complete(task, name, note):", ":", "a damaged shard is written anew"),
    Mutant(_EXPORT, "        if not _holds(task, name, note):\n", "        if False:\n", "every shard is read again at the end"),
    Mutant(_EXPORT, ' and sha256_of(path) == note["sha256"]', "", "a shard is compared by its SHA-256"),
    Mutant(_EXPORT, "    if rows != expected:\n", "    if False:\n", "the rows of an export are counted"),
    Mutant(_EXPORT, "            _unfinish(folder)\n            size", "            size", "nothing says that a folder is whole while it changes"),
    Mutant(_EXPORT, 'pc.and_(pc.equal(table["status"], "ok"), pc.is_null(table["embedding"]))', 'pc.is_null(table["embedding"])',
           "a failed row lacks no vector"),
    Mutant(_ROWS, 'positions = pc.index_in(rows["ordinal"], value_set=vectors["ordinal"].combine_chunks())',
           "positions = pa.chunked_array([pa.array(range(rows.num_rows))])", "each row gets its own vector"),
    Mutant(_ROWS, "rows = rows.filter(chosen)", "pass", "only chosen rows are exported"),
    Mutant(_ROWS, "        if now != self.versions[key]:\n", "        if False:\n", "an exported row is the one that the condition saw"),
    Mutant(_ROWS, "if self.chosen is not None else {}),", "if False else {}),", "a shard of other chosen rows is written anew"),
    Mutant(_EXPORT, "elif pa.types.is_string(field.type) and not raw_cells:", "elif False:", "a cell of a CSV is no formula"),
    Mutant(_EXPORT, " and task.rows.images.holds(_key_of(name), note)", "", "an export has each copy of an image, and no other"),
    Mutant(_EXPORT, ' and not task.rows.images.readable(note["unread"])', "", "an image that is back is exported"),
    Mutant(_EXPORT, "            task.rows.images.remove(key)\n", "            pass\n", "copies of what is exported no more are removed"),
    Mutant(_REVIEW, "if digest not in named}", "if False}", "a verdict is of the answer that was judged"),
    Mutant(_REVIEW, "before.judgement == verdict.judgement", "False", "a verdict is not taken twice"),
    Mutant(_REVIEW, "before.outlasts(on_all_sets)", "before.outlasts(verdict)", "no verdict replaces one that chance drew and that counts"),
    Mutant(_REVIEW, "catalog.ordinals_of(drawn_by_chance(settings.home))",
           "catalog.ordinals_of([name for name, verdict in verdicts(settings.home).items() if verdict.by_chance])",
           "what chance drew is not drawn again"),
    Mutant(_DESCRIBED, "    return are_vectors_of(embedded, described)\n", "    return True\n", "the table has no vectors of other texts"),
    Mutant(_DESCRIBED, "expires_all=withdraws,", "expires_all=False,", "a table forgets a withdrawn property with its snapshots"),
    Mutant(_DESCRIBED, '"write.metadata.metrics.default": "none"', '"write.metadata.metrics.default": "full"',
           "no manifest of a table names a withdrawn property"),
    Mutant(_DESCRIBED, "is_whole = table is not None and not lost_files(table, files)", "is_whole = table is not None",
           "a file that a table lost is written again"),
    Mutant(_CHANGES, "self.versions.get(files.described.key) == files.version", "files.described.key in self.versions",
           "a new version of a partition is compared"),
    Mutant(_CHANGES, "digest()[:_DIGEST_BYTES]", "digest()[:0].ljust(16)", "a row that differs is told"),
    Mutant(_CHANGES, ".encode() + vector", ".encode()", "another vector is told"),
    Mutant(_CHANGES, "rows = {at: row for at, row in rows.items() if not is_tombstone(row.property_id)}", "rows = dict(rows)",
           "a snapshot keeps nothing of a withdrawn property"),
    Mutant(_CHANGES, "            if before is None or (earlier is not None and not is_tombstone(earlier.property_id)):\n", "            if earlier is None:\n",
           "a withdrawn id is told"),
    Mutant(_CHANGES, "                raise _NotKeptError\n            return None\n", "                return None\n            return None\n",
           "what a lost version said is not called new"),
    Mutant(_CHANGES, "            if following is not None:\n                version", "            if False:\n                version",
           "the next snapshot has what did not change"),
    Mutant(_CHANGES, "        finally:\n            writer._discard()\n", "        finally:\n            pass\n", "a snapshot that was not finished leaves nothing"),
    Mutant(_IMAGES, ".readlink() != place:", ".readlink() == Path():", "a link that is put there meanwhile is not followed"),
    Mutant(_IMAGES, "len(content) > EMBEDDED_BYTES", "False", "an embedded image is bounded"),
    Mutant(_IMAGES, "self._root.size(name) is None", "False", "a link to a missing image is null"),
    Mutant(_IMAGES, "isinstance(place, Path) and not _has_entries(place)", "False", "a disk that is away is no loss of images"),
    Mutant(_IMAGES, "kind not in _SETTLED", "True", "what stays as it is costs no second export"),
    Mutant(_IMAGES, 'quote(name.lstrip("/"))', "name", "a URL is escaped"),
    Mutant(_IMAGES, "        _remove(self._folder / key, except_for=shard.copies)\n", "        pass\n", "no copy is left of what no row names"),
    Mutant(_IMAGES, 'raise ImageError("unreadable", f"{name} is not an image that is known here.")', 'return ("", "")',
           "only images are copied"),
    Mutant(_QUALITY, "false_discovery_control([comparison.chance for comparison, _ in tested])", "[comparison.chance for comparison, _ in tested]", "many comparisons name few by chance"),
    Mutant(_QUALITY, "false_discovery_control([comparison.chance for comparison, _ in tested])", "[comparison.chance * len(tested) for comparison, _ in tested]", "many odd partitions are found together"),
    Mutant(_QUALITY, " if test[0].distance >= LEAST_DISTANCE]", "]", "a small difference is not named"),
    Mutant(_QUALITY, "telling.sum(axis=1) - 1, 1)", "telling.sum(axis=1), 1)", "the chance of a partition is a chance"),
    Mutant(_QUALITY, "telling = expected >= 5\n", "telling = expected >= 0\n", "a rare value tells nothing"),
    Mutant(_QUALITY, "np.bincount(partitions, counts) >= _ENOUGH_ROWS // 2", "np.bincount(partitions, counts) >= 0",
           "a few rows are not compared"),
    Mutant(_CONFIDENCES, "        if chances[place] > risk:\n            break\n", "        if chances[place] > risk:\n            continue\n",
           "no threshold is tested below one that failed"),
    Mutant(_CONFIDENCES, "        risk /= 2\n", "", "the risks of all looks are the risk"),
    Mutant(_CONFIDENCES, "binom.sf(right_above - 1, above, target)", "binom.sf(right_above, above, target)", "a test is exact"),
    Mutant(_CONFIDENCES, " / inclusion\n", " * np.ones(len(positions))\n", "a mean over chosen properties is that of all"),
    Mutant(_GUARANTEE, "pc.if_else(is_sure, pc.struct_field(raw, field.name), nothing)", "pc.struct_field(raw, field.name)",
           "an answer that is not sure enough is not shown"),
    Mutant(_GUARANTEE, "settings_digest({} if record is None else record.metadata.get(\"parts\", {}))", "next(iter(self.thresholds), (\"\",))[0]",
           "labels of one model promise nothing of another's answers"),
    Mutant(_CERTIFICATION, "planned.labels, first=first)", "planned.labels)", "labels of a look are the first of later ones"),
    Mutant(_CERTIFICATION, "if planned.labels > promise.labels:", "if planned.labels > 2 * promise.labels:", "nothing is promised by too few labels"),
    Mutant(_LABELS, "weight, is_random = verdict.weight, verdict.by_chance", "weight, is_random = verdict.weight, True",
           "what was chosen for being unsure certifies nothing"),
    Mutant(_LABELS, "source.filler(answers) or source.first", "source.first", "a label is of the answer that is shown"),
    Mutant(_LABELS, "may_certify = file is None or not names_a_model(file)", "may_certify = True", "a model certifies nothing"),
    Mutant(_INTERVALS, "for sign in (1, -1))", "for sign in (-1, 1))", "the first contender is the better one, and not the second"),
    Mutant(_INTERVALS, " if self.differing else ", " if True else ", "without a difference nobody is called better"),
    Mutant(_INTERVALS, "len(values) / _design_effect(values, lowest=0.0)", "len(values)", "fields that fail alone count for more than one answer"),
    Mutant(_INTERVALS, "(_ADDED, _ADDED)", "(1e-9, 1e-9)", "one error never looks surer than none"),
    Mutant(_INTERVALS, "z2 / (4 * size * size)", "0.0", "a share without an error is no certainty"),
    Mutant(_INTERVALS, "2 * pairs - better + worse", "2 * pairs", "the score is that of the most likely chances"),
    Mutant(_COMPARE, "row.attempts > 1 or row.description is None for", "row.attempts > 1 for", "an answer that failed was invalid"),
    Mutant(_COMPARE, "asked = [row for row in described if row.attempts]", "asked = [*described]", "what was never asked gave no invalid answer"),
    Mutant(_COMPARE, "trial.days * 24 * trial.devices * price_per_hour", "trial.days * 24 * price_per_hour", "all devices are paid for"),
    Mutant(_COMPARE, "-len(differing[property_id])", "len(differing[property_id])", "what differs most is shown first"),
    Mutant(_SECOND_OPINION, " if row.property_id in again", "", "only what is asked again has another answer"),
    Mutant(_SECOND_OPINION, " * len(again) / len(first.described)", "", "only what is asked again is paid for"),
    Mutant(_SECOND_OPINION, "load_seconds=first.load_seconds + second.load_seconds", "load_seconds=first.load_seconds", "both models are loaded for each partition"),
    Mutant(_PACE, "beside / max(1, self.devices - 1)", "min(1, beside)", "devices share the cores evenly"),
    Mutant(_FORECAST, "    total = seconds + lost / max(1, working)\n", "    total = seconds + lost\n", "work is lost on one device of several"),
    Mutant(_FORECAST, "batch / 2 + start", "start", "a failure costs half a batch"),
    Mutant(_FORECAST, "settings.commit_seconds / 2 + ", "", "a failure costs half a commit interval"),
    Mutant(_FORECAST, " + runs * spread**2", "", "the band knows how the measured runs differ"),
    Mutant(_FORECAST, " + sum(off * off for off in offs)", "", "the band knows how far the last plans were off"),
    Mutant(_FORECAST, "seconds * factor + many * again", "seconds * factor", "the band knows the failures that are likely"),
    Mutant(_FORECAST, "math.hypot(of_rate, of_run)", "of_rate", "a run is one more repetition"),
    Mutant(_PACE, "        return max(wall, cores)\n", "        return wall\n", "work takes as long as its cores need"),
    Mutant(_PACE, "enumerate(sorted(images, reverse=True))", "enumerate(images)", "the heaviest partition comes first"),
    Mutant(_LEASES, "with contextlib.suppress(OSError):\n                path.unlink()", "path.unlink(missing_ok=True)",
           "a note that cannot be removed keeps no device"),
    Mutant(_LEASES, "        # While the lock is still held: a moment later the record may be the next holder's.\n",
           "        for lock in self._locks:\n            lock.close()\n", "the next holder's note is never removed"),
    Mutant(_LEASES, "                _refuse_if_locks_do_not_hold(path)\n", "", "a file system without locks is refused"),
    Mutant(_LEASES, "            if reasons and device.given:\n", "            if False:\n", "what a cluster gave is taken"),
    Mutant(_WHERE, "({self.text}\\n), false)", "({self.text}\\n), true)", "what is not known does not hold"),
    Mutant(_WHERE, "for filler in fillers)", "for filler in fillers[:0])", "a condition looks at the better answer"),
    Mutant(_WHERE, 'node["function_name"] in unsteady', "False", "a condition says the same each time"),
    Mutant(_WHERE, "above = names[: names.index(SET_PREFIX + name)]", "above = names", "no two sets wait for each other"),
    Mutant(_CHECKS, "        passed=not differing,\n        expected=f\"{counted(len(left_out)", "        passed=True,\n        expected=f\"{counted(len(left_out)",
           "who was asked is who the condition names"),
    Mutant(_FINGERPRINT, "frozenset({TEXTS, LOOKED_AT})", "frozenset({TEXTS})", "a set follows what its condition looks at"),
    Mutant(_LEASES, "            if not keep:\n", "            if False:\n", "a lock that is not kept is given back"),
    Mutant(_PROCESSES, "        if have_ended(grace):\n            return True\n", "        have_ended(grace)\n", "who ends in its grace is not killed"),
    Mutant(_PROCESSES, "    send(signal.SIGKILL)\n    return have_ended(kill_seconds)\n", "    return have_ended(kill_seconds)\n",
           "who does not end in its grace is killed"),
    Mutant(_PROCESSES, "    return have_ended(kill_seconds)\n", "    have_ended(kill_seconds)\n    return True\n", "who outlives SIGKILL is said"),
    Mutant(_PROCESSES, "(min(limits), hard)", "(hard, hard)", "an image that wants too much memory fails by itself"),
    Mutant(_PROCESSES, "    finally:\n        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))\n", "    finally:\n        pass\n",
           "the limit of memory is for decoding alone"),
    Mutant(_PROCESSES, "        *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY),\n", "", "a lower limit of the process stays"),
    Mutant(_ORDER, 'seed_of("order", seed, epoch)', 'seed_of("order", seed)', "each epoch has an order of its own"),
    Mutant(_ORDER, "            if expected != actual:\n", "            if False:\n", "a sample that is not the planned one is noticed"),
    Mutant(_LOOP, "                self._order.check(parts[number], microbatch.samples)\n", "", "what a loader gives is compared with the plan"),
    Mutant(_LOOP, "        if [*(first for first, _ in computed), stop] != ", "        if False and [] != ",
           "the microbatches of all ranks are the samples of the step, each once"),
    Mutant(_SCHEMA, "sorted(map(_plain, first)) == sorted(map(_plain, second))", "set(map(_plain, first)) == set(map(_plain, second))",
           "a list with a repetition is another list"),
    Mutant(_CANARY, "        if differing.confirmed:\n            why", "        if True:\n            why", "of two that differ neither is left out"),
    Mutant(_CANARY, "record is not None and differs and record.confirmed", "False", "what two devices have given does not make way"),
    Mutant(_CANARY, "            if good_at is not None and good_at > now:\n", "            if False:\n", "a clock that was ahead hides no rows"),
    Mutant(_CANARY, "        elif last.digest == self._first.digest:\n", "        elif True:\n", "what changed meanwhile is not published"),
    Mutant(_CANARY, "first <= self.at and last > (self.good_at or 0.0)", "first <= self.at", "the last good canary vouches for what was before it"),
    Mutant(_LEFT_OUT, "            _forget_contradicted(connection, device)\n", "", "a person's word frees the only device that is left"),
    Mutant(_STATE_TABLES, "*_table.columns)", "*_table.primary_key)", "every cell of the control state stands twice"),
    Mutant(_STATE, "            if copy.changes > changes and copy.is_whole():\n", "            if False:\n",
           "an older control state that is put back is noticed"),
    Mutant(_STATE, "            if copy:\n                # Damage", "            if False:\n                # Damage",
           "damage of the control state costs no change that is copied at once"),
    Mutant(_STATE, "        if copy:\n            self._copy()\n", "        if False:\n            self._copy()\n",
           "a pause, a cancel and a device left out are copied at once"),
    Mutant(_STATE, "exists() and not self._copies.were_made:\n", "exists():\n",
           "a lost control state is not read as an empty one"),
    Mutant(_STATE, "            self._file.refuse_lost_disk()\n", "", "a control state on a disk that is not mounted is not empty"),
    Mutant(_STATE, "doubtful = copy is None or copy.changes < listed[0].changes", "doubtful = copy is None",
           "if the newest copy is damaged too, everything is paused"),
    Mutant(_STATE, "            connection.execute(tables.restorations.insert().values(asdict(restoration)))\n", "",
           "a control state that was put back says so"),
    Mutant(_STATE, "return sha256_of(self.path) == self.sha256", "return True", "a damaged copy is not put back"),
    Mutant(_STATE, "                check_pages(copied, temporary)\n", "", "no copy is made of a damaged control state"),
    Mutant(_STATE_FILE, "if identity == self._checked:", "if True:", "the control state is checked before its first use"),
    Mutant(_STATE_FILE, 'for ending in ("", "-wal", "-shm"):', 'for ending in ("",):', "a restored control state has no older one's log"),
    Mutant(_STATE_FILE, 'exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")', 'exec_driver_sql("BEGIN")',
           "of two changes at once neither is lost"),
    Mutant(_JOINED_SETS, "            self._failures.append((asset, error))\n", "            raise\n",
           "each question set publishes before another's failure is raised"),
    Mutant(_JOINED_SETS, "if len(self.asking) == 1 or device_failure(error) is not None:", "if True:",
           "a question set that fails half way leaves the others at work"),
    Mutant(_JOINED_SETS, " or device_failure(error) is not None:", ":",
           "a device that fails under two question sets is held to account"),
    Mutant(_JOINED_SETS, "            except Exception as error:\n                self._leave_out(of_set, error)\n        for number",
           "            except ZeroDivisionError as error:\n                self._leave_out(of_set, error)\n        for number",
           "a journal that cannot be read keeps no other question set waiting"),
    Mutant(_JOINED_SETS, " if answer.question == self.question]", "]", "each question set's journal has its own rows alone"),
    Mutant(_JOINED_SETS, "                of_set.submit_rows(described, engine, device)\n",
           "                of_set.submit_rows(described, engine, device)\n                of_set.run.progress.advance(0)\n",
           "a pause ends the work when each question set has its rows"),
    Mutant(_JOINED_SETS, "            of_set.run.work_beside(other.run for other in self.sets)\n", "            pass\n",
           "a question set that only waits to publish lives as long as the others"),
    Mutant(_DESCRIBED_ASSETS, "options = config.of(asset)", "options = config", "each question set has its own options"),
    Mutant(_JOINED_SETS, '                log.error(f"{asset} failed too: {error}")\n', "                pass\n",
           "the failure of a second question set is told"),
    Mutant(_PARTITION, "return self.settings.layout.asset(self.asset).partition(self.key)", "return self.settings.descriptions.partition(self.key)",
           "a question set's journal is its own"),
    Mutant(_PARTITION, "        if mark is not None and mark.retired:\n", "        if False:\n", "a generation that is closed is not opened again"),
    Mutant(_PARTITION, "        if last is not None and last.retired:\n", "        if False:\n", "a journal that is put back beside its published file stops no start"),
    Mutant(_MATERIALIZE, 'return not asks_for_rows or record.metadata.get("generation") == self._generation', "return not asks_for_rows",
           "a retry of a recomputation that is published computes nothing"),
    Mutant(_MATERIALIZE, " or option in (ANEW, now.settings_digest):", ":", "a run that is told to makes a stale partition anew"),
    Mutant(_MATERIALIZE, "option in (ANEW, now.settings_digest)", "True", "a run that was not told leaves what is stale"),
    Mutant(_MATERIALIZE, "                yield from self._emit(published_file_result(self.key, standing))\n                raise refusal\n",
           "                yield from self._emit(published_file_result(self.key, standing))\n", "refused rows are not published"),
    Mutant(_CHECKS, "failed > self.accepted.rows and ", "", "as many failed rows as a person accepted are published"),
    Mutant(_CHECKS, " and failed >= _JUDGED_ROWS and failed >= self.error * rows", " and failed >= self.error * rows",
           "one broken listing refuses no small partition"),
    Mutant(_CHECKS, "(counts.missing or counts.foreign or unsettled)", "(counts.foreign or unsettled)", "a missing property is found"),
    Mutant(_CHECKS, "(counts.missing or counts.foreign or unsettled)", "(counts.missing or counts.foreign)",
           "a row that is neither ok nor failed is found"),
    Mutant(_CHECKS, "passed=not counts.duplicate,", "passed=True,", "a row that stands twice is found"),
    Mutant(_QUESTION_SETS, "        if others:\n", "        if False:\n", "the options of one question set are not those of all"),
    Mutant(_QUESTION_SETS, "return of_sets.get(asset, of_all)", "return of_all", "the options of a question set are read back"),
    Mutant(_QUESTION_SETS, "key = MODEL_KEY if sees_alike else", "key = MODEL_KEY if True else", "a question set of another model is asked of that one"),
    Mutant(_QUESTIONS_FILE, "            if str(key.value) in seen:\n", "            if False:\n", "a question set that stands twice is not lost"),
    Mutant(_QUESTIONS_FILE, "    if name in _RESERVED:\n", "    if False:\n", "no question set has the files of another asset"),
    Mutant(_QUESTIONS_FILE, 'extra="forbid"', 'extra="ignore"', "a key of a question set that is misspelt is refused"),
    Mutant(_FURTHER, '    if load_schema(kept).digest != record.metadata["parts"].get("schema"):\n', "    if False:\n",
           "a schema that changed otherwise too is not split"),
    Mutant(_FURTHER, "    refuse_wrong_sets(asked, questions)\n", "", "a question set that cannot be asked is not written down"),
    Mutant(_KEPT, "return tuple(dict.fromkeys((*settings.partitioned_assets, *range_assets(settings.layout, store))))",
           "return settings.partitioned_assets", "a question set that no settings name is looked after"),
    Mutant(_KEPT, "return tuple(dict.fromkeys((*settings.partitioned_assets, *sets)))", "return settings.partitioned_assets",
           "the store's copy of a removed question set is withdrawn from"),
    Mutant(_WITHDRAWAL, "in_store, assets = assets_in_store(settings), kept_assets(settings, store)",
           "in_store, assets = assets_in_store(settings), settings.partitioned_assets", "a removed question set's files are withdrawn from"),
    Mutant(_WITHDRAWAL, "withdraw_journals(settings, assets, catalog, key)", "withdraw_journals(settings, settings.partitioned_assets, catalog, key)",
           "a removed question set's journals are withdrawn from"),
    Mutant(_BACKFILL, "left[key].discard(asset)", "pass", "a question set that a backfill makes is not launched twice"),
    Mutant(_BACKFILL, "left[key].discard(asset)", "left[key].clear()", "a question set that a backfill under way knows nothing of is launched"),
    Mutant(_BACKFILL, "return {key: with_downstream(self.settings, assets) for key, assets in lacking.items()}",
           "return {key: set(self.assets) for key in lacking}", "what is complete is not read again for a question set that is not"),
    Mutant(_BACKFILL, "assets.difference(with_downstream(self.settings, made_elsewhere))", "assets",
           "what is made from answers that another backfill makes waits for them"),
    Mutant(_BACKFILL, "with_downstream(self.settings, assets)", "assets", "vectors follow the descriptions that are made anew"),
    Mutant(_BACKFILL, "                under_way -= status.stale_keys\n", "                pass\n", "a backfill under other settings makes no stale partition anew"),
    Mutant(_STALE, "sum(max(of_set.get(key, 0) for of_set in anew.values()) for key in described)",
           "sum(sum(of_set.get(key, 0) for of_set in anew.values()) for key in described)", "a partition that is stale in two question sets counts once"),
    Mutant(_STALE, "    return state.new_images or 0 if only_images else state.expected\n", "    return state.expected\n",
           "where images alone changed, the others are not asked again"),
    Mutant(_FINGERPRINT, "(LOOKED_AT in changed and OF_THE_PARTITION.issuperset(changed))", "LOOKED_AT in changed",
           "another condition waits for a person, whatever is published meanwhile"),
    Mutant(_WHERE, '    "STAR": "several columns",\n', "", "a condition is one for each property"),
    Mutant(_STALE, " and not OF_UPSTREAM.issuperset(state.changed)\n", "\n", "vectors of earlier texts are no question"),
)  # fmt: skip
