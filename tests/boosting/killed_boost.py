"""A run of the pipeline that the test kills: endpoint, output folder, number of scenes."""

import sys

from hf_captionrl.boosting import boost_shard, merge_journals
from tests.boosting.doubles import endpoints, scenes

if __name__ == "__main__":
    url, folder, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    backends = endpoints(url, concurrency=2)
    rows = scenes(number)
    boost_shard(rows, folder, rows_at_once=7, **backends)
    merge_journals(rows, folder, **backends)
