"""Learning on graphs whose features are in host memory or on disk.

graph = jo.graph.read_wordnet().graph
for batch in jo.graph.Batches(graph, seeds, jo.disk_put(features, folder), fanouts=(8, 8),
                              batch_size=256):
    params = step(params, batch)
"""

from jaxoffload.graph import layers as layers
from jaxoffload.graph.batches import Batch as Batch
from jaxoffload.graph.batches import Batches as Batches
from jaxoffload.graph.device_rows import DeviceRows as DeviceRows
from jaxoffload.graph.device_rows import SplitRows as SplitRows
from jaxoffload.graph.device_rows import joined as joined
from jaxoffload.graph.embedding import Embedding as Embedding
from jaxoffload.graph.hot_rows import HotRows as HotRows
from jaxoffload.graph.relational import Graph as Graph
from jaxoffload.graph.sampling import Sample as Sample
from jaxoffload.graph.sampling import sample as sample
from jaxoffload.graph.triples import Triples as Triples
from jaxoffload.graph.triples import read_triples as read_triples
from jaxoffload.graph.wordnet import WordNet as WordNet
from jaxoffload.graph.wordnet import read_wordnet as read_wordnet
