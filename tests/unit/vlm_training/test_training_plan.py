"""The list of samples: what was written is read, whatever a text holds."""

from vlm_training.training_plan import Sample, SampleFile, write_samples


def test_a_text_with_line_separators_is_one_sample(tmp_path):
    """U+2028 and its like end no line of the file: a description that has one breaks no training."""
    texts = ["one\u2028two", "three\x85four\u2029", "five\nsix"]
    samples = [Sample(f"p{number}", ("a.jpg",), {"text": text}) for number, text in enumerate(texts)]
    write_samples(tmp_path / "samples.jsonl", samples)
    read = SampleFile(tmp_path / "samples.jsonl")
    assert [read[number] for number in range(3)] == samples
