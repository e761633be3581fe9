"""What a person looks at: pictures of a capture."""

from .heatmap import heatmap_html, heatmap_png

__all__ = ["heatmap_html", "heatmap_png"]
