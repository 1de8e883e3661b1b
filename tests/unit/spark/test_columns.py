"""Names and types of columns are what Spark makes of them."""

from __future__ import annotations

import pytest

from pyspark_nsqha.reading.columns import DEFAULT, KNOWN, arrow_schema, check, ddl, type_of

pyspark = pytest.importorskip("pyspark")


@pytest.mark.parametrize("names", [DEFAULT, KNOWN, ("value",), ("headers", "offset")])
def test_the_arrow_schema_is_what_spark_makes_of_the_ddl(names):
    from pyspark.sql.pandas.types import to_arrow_schema

    expected = to_arrow_schema(spark_schema(ddl(names)), timezone="UTC")
    assert arrow_schema(names).equals(expected, check_metadata=True)
    assert str(arrow_schema(names)) == str(expected)


def spark_schema(text):
    """StructType.fromDDL asks a JVM; this one knows what columns have."""
    from pyspark.sql import types as t

    pair = t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
    kinds = {
        "binary": t.BinaryType(),
        "string": t.StringType(),
        "int": t.IntegerType(),
        "bigint": t.LongType(),
        "timestamp_ltz": t.TimestampType(),
        "array<struct<key:string,value:binary>>": t.ArrayType(pair),
    }
    fields = [field.split("` ") for field in text[1:].split(", `")]
    return t.StructType([t.StructField(name, kinds[kind]) for name, kind in fields])


def test_kafkas_columns_come_first():
    assert DEFAULT[:7] == ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
    assert ddl(("value", "offset")) == "`value` binary, `offset` bigint"


def test_times_are_the_same_type_whatever_a_session_calls_a_timestamp():
    assert ddl(("timestamp", "deliver_at")) == "`timestamp` timestamp_ltz, `deliver_at` timestamp_ltz"


def test_a_type_is_what_spark_calls_it():
    assert [type_of(field.name) for field in spark_schema(ddl(KNOWN)).fields] == [
        field.dataType.simpleString() for field in spark_schema(ddl(KNOWN)).fields
    ]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["value", "vlaue", "x"], "columns: no column 'vlaue', 'x'; there are " + ", ".join(KNOWN)),
        (["id", "value", "id"], "columns: 'id' is named twice; name each column once"),
        ([], "columns: none is named; there are " + ", ".join(KNOWN)),
    ],
)
def test_what_is_not_a_column_is_named(names, text):
    with pytest.raises(ValueError) as refused:
        check(names)
    assert str(refused.value) == text
