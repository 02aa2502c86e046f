"""Keys of the server."""

from mlmoe_jax.runtime.keys import PathKey, TextKey, section

SERVE_KEYS = section(
    "The images of Label Studio's tasks that mlmoe serve reads.",
    stages=("serve",),
    on_resume="free",
    shared="default",
    folder=PathKey("", "Folder of the local files of Label Studio, whose images it may name; if empty, none."),
    label_studio=TextKey(
        "", "Label Studio server whose images are fetched with the token $LABEL_STUDIO_API_KEY; if empty, none."
    ),
)
