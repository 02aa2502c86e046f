"""Keys of the server."""

from mlmoe_jax.runtime.keys import PathKey, TextKey, TextsKey, section

SERVE_KEYS = section(
    "What mlmoe serve answers to, and the images of Label Studio's tasks that it reads.",
    stages=("serve",),
    on_resume="free",
    shared="default",
    hosts=TextsKey((), "Names of a proxy, without ports, by which its clients call a server on this machine."),
    folder=PathKey("", "Folder of the local files of Label Studio, whose images it may name; if empty, none."),
    label_studio=TextKey(
        "", "Label Studio server whose images are fetched with the token $LABEL_STUDIO_API_KEY; if empty, none."
    ),
)
