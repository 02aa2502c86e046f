"""A page that labels photographs with the model of this folder.

pip install gradio -r requirements.txt
python app.py
"""

from __future__ import annotations

from typing import Any


def label(model: Any, path: str | None) -> tuple[str, dict[str, float]]:
    """Label an image file.

    Args:
      model: a `Model` of load.py.
      path: path of the image file; None = no image.

    Returns:
      The assigned labels, separated by commas and sorted by decreasing probability, and a dict label -> probability of
      all labels.
    """
    if path is None:  # the image was removed
        return "", {}
    [scores] = model([model.read(path)])
    assigned = [model.labels[k] for k in model.assign(scores)]
    return ", ".join(assigned), {name: float(score) for name, score in zip(model.labels, scores, strict=True)}


def page(model: Any) -> Any:
    """Return the web page that labels an uploaded image, a `gradio.Interface`."""
    import gradio

    def answer(path: str | None) -> tuple[str, dict[str, float]]:
        try:
            return label(model, path)
        except Exception as error:  # Pillow's decoders raise many types for damaged data
            raise gradio.Error(f"the image cannot be read: {error or type(error).__name__}") from error

    image = gradio.Image(type="filepath", image_mode=None, label="image")  # without a mode, the file is not changed
    outputs = [gradio.Textbox(label="labels"), gradio.Label(label="probability", num_top_classes=10)]
    return gradio.Interface(answer, image, outputs, title="Labels of an image", flagging_mode="never", api_name="label")


if __name__ == "__main__":
    from load import Model

    page(Model()).launch()
