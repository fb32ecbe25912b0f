"""Which images of a sample are shown."""

from vlm_training.objective import load_images
from vlm_training.training_plan import Sample, TrainingPlan


def test_a_bad_address_is_an_image_that_cannot_be_read():
    """It costs this image, not the rank."""
    limits = {"pixels": 65_536, "images": 3, "answer_tokens": 256}
    names = {"variant": "tiny", "prompt": "Describe."} | dict.fromkeys(("base", "samples", "schema"), "a:b")
    plan = TrainingPlan(**names, learning_rate=0.1, seed=1, batch=1, microbatches=1, limits=limits)
    assert load_images(Sample("a", ("s3://No_Bucket/a.jpg", "s3://bucket/../a.jpg"), {}), plan) == []
