"""Tables of samples: CSV and Parquet files."""
