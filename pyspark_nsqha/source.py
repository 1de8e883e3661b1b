"""The data source behind `format("nsqha")`: one class that reads and writes, and imports on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

SUBSCRIBING = ("subscribe", "subscribepattern", "assign")  # a read has one of them, a sink has none


class DefaultSource(DataSource):
    """The data source "nsqha"."""

    @classmethod
    def name(cls) -> str:
        return "nsqha"

    def __init__(self, options: Any) -> None:
        """A read is checked and pinned here; a sink's options are checked by its writer. OptionError, ReadFailed."""
        super().__init__(options)
        self.pinned: Any = None
        self._planned = False
        if any(name.lower() in SUBSCRIBING for name in options):
            from pyspark_nsqha.batch import pin

            self.pinned = pin(options)

    def __getstate__(self) -> dict[str, Any]:
        """Everything for planners; tasks have their splits, and need neither a snapshot nor options."""
        return self.__dict__ | ({"pinned": None, "options": {}} if self._planned else {})

    def schema(self) -> str:
        from pyspark_nsqha.batch import schema

        return schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_nsqha.batch import batch_reader

        reader = batch_reader(self.options, self.pinned, schema)
        self._planned = True
        return reader

    def streamReader(self, schema: StructType) -> Any:
        from pyspark_nsqha.streams.stream import stream_reader

        reader = stream_reader(self.options, self.pinned, schema)
        self._planned = True
        return reader

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_nsqha.writing.sink import NsqhaWriter

        return NsqhaWriter(schema, overwrite, self.options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_nsqha.writing.sink import NsqhaStreamWriter

        return NsqhaStreamWriter(schema, overwrite, self.options)
