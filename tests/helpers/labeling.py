"""What Label Studio and CVAT export."""


def choices(*names, control="labels") -> dict:
    return {"from_name": control, "to_name": "image", "type": "choices", "value": {"choices": list(names)}}


def task(image, *annotations, **data) -> dict:
    return {"id": 1, "data": {"image": image, **data}, "annotations": list(annotations), "predictions": []}


def annotation(*results, **more) -> dict:
    return {"id": 1, "result": list(results), "was_cancelled": False, "ground_truth": False, **more}


LABELS_XML = """<View><Image name="i" value="$image"/>
<Choices name="quality" toName="i"><Choice value="blurred"/></Choices>
<Choices name="labels" toName="i"><Choice value="sky &amp; sea"/><Choice value="An ape" alias="ape"/></Choices>
<Taxonomy name="place" toName="i"><Choice value="zoo"/></Taxonomy></View>"""

CVAT_XML = """<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
<meta><project><name>not a label</name><labels>
<label><name>sea</name><attributes><attribute><name>difficult</name></attribute></attributes></label>
<label><name>sand &amp; sun</name></label></labels></project></meta>
<image id="0" name="a.png" subset="train"><tag label="sand &amp; sun"/></image>
<image id="1" name="b c.png" subset="train">
  <box label="sea" xtl="0"><attribute name="difficult">true</attribute></box>
  <box label="sea" xtl="1"><attribute name="difficult">false</attribute></box>
  <tag label="sand &amp; sun"><attribute name="difficult">true</attribute></tag></image>
<image id="2" name="e.png" subset="val"></image></annotations>
"""
