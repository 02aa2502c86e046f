import numpy as np
from helpers.color_model import HALVES, color, make_run
from PIL import Image

from mlmoe_jax.config import default_config
from mlmoe_jax.data.decoding import Decoding, open_image, read_image
from mlmoe_jax.data.transforms import resize_square
from mlmoe_jax.inference.inputs import MixedImages, read_images
from mlmoe_jax.inference.predictor import Predictor


def test_one_image_in_every_form(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    given = MixedImages([str(path), path, path.read_bytes(), pixels, Image.fromarray(pixels), Image.open(path)])
    assert len(given) == 6
    for row in range(6):
        np.testing.assert_array_equal(given.read(row), pixels, err_msg=str(row))
    assert [given.name(row) for row in range(4)] == [str(path), str(path), "image 2", "image 3"]


def test_a_prediction_warns_of_several_frames(tmp_path, caplog):
    frames = [Image.fromarray(color(value)) for value in (1, 2)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    config = default_config()
    config.data.image_size = 4
    for predict in (Predictor(make_run(), HALVES), lambda path: read_images(path, config)):
        caplog.clear()
        predict(tmp_path / "a.gif")
        assert caplog.text.count("the input has 1 image with several frames, of which the first is used: ") == 1


def test_modes_that_few_files_have(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**16, (4, 6), np.int32)
    Image.fromarray(values).save(tmp_path / "a.tiff")
    wide = Image.open(tmp_path / "a.tiff")
    assert wide.mode == "I"
    np.testing.assert_array_equal(MixedImages([wide]).read(0), read_image(tmp_path / "a.tiff"))

    palette = Image.fromarray(np.zeros((4, 6, 4), np.uint8)).convert("LA").convert("PA")
    others = [Image.new(mode, (6, 4)).convert(to) for mode, to in (("LA", "La"), ("RGBA", "RGBa"), ("RGB", "RGBX"))]
    for image in (palette, *others):
        assert MixedImages([image]).read(0).shape == (4, 6, 3), image.mode


def test_images_are_decoded_as_small_as_in_evaluation(tmp_path):
    ramp = np.broadcast_to(np.arange(1600, dtype=np.uint8)[None, :, None], (1200, 1600, 3))
    Image.fromarray(ramp).save(tmp_path / "a.jpg")
    config = default_config()
    config.data.image_size, config.data.reduced_decoding = 224, True
    expected = resize_square(open_image(tmp_path / "a.jpg", decoding=Decoding(224)), 224)
    np.testing.assert_array_equal(read_images(tmp_path / "a.jpg", config), expected[None])
    together = read_images([tmp_path / "a.jpg", read_image(tmp_path / "a.jpg")], config)
    np.testing.assert_array_equal(together[0], expected)
    assert together.shape == (2, 224, 224, 3)
    config.data.reduced_decoding = False
    assert (read_images(tmp_path / "a.jpg", config)[0] != expected).any()


def test_a_pillow_image_is_read_like_its_file(tmp_path):
    """With transparency and an EXIF orientation."""
    pixels, exif = np.random.default_rng(0).integers(0, 256, (4, 6, 4), np.uint8), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    expected = read_image(tmp_path / "a.png")
    assert expected.shape == (6, 4, 3)
    np.testing.assert_array_equal(MixedImages([Image.open(tmp_path / "a.png")]).read(0), expected)


def test_images_are_upright_whatever_the_config_says(tmp_path):
    pixels, exif = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    config = default_config()
    config.data.exif, config.data.image_size = "ignore", 8
    np.testing.assert_array_equal(read_images(tmp_path / "a.png", config), np.rot90(pixels, -1)[None])
