"""Plans for people: tables, traces for Perfetto, summaries in words, rotor's names."""
