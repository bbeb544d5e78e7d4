"""Plans as text, as traces for Perfetto, as summaries."""
