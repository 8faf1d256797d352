"""Pictures of records: self-contained SVG files, drawn without a library."""
