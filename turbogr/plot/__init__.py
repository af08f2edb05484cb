"""Every plot of the project: plain data in, standalone SVG text out.

All drawing goes through these functions; no other package makes SVG. Values that are not finite (or not positive on a
logarithmic axis, or beyond 1e±100) are left out of a chart: a line breaks there.
"""

from turbogr.plot.bar_charts import Span, bar_chart, grouped_bar_chart, histogram, span_chart
from turbogr.plot.scales import Axis, percent, si
from turbogr.plot.svg import STYLE, Mark
from turbogr.plot.xy_charts import Series, line_chart, scatter_chart, thinned

__all__ = [
    "STYLE",
    "Axis",
    "Mark",
    "Series",
    "Span",
    "bar_chart",
    "grouped_bar_chart",
    "histogram",
    "line_chart",
    "percent",
    "scatter_chart",
    "si",
    "span_chart",
    "thinned",
]
