"""Containers of many images, such as Parquet files, on local disk or at an address."""
