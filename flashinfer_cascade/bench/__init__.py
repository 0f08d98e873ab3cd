"""Workloads to plan, run and measure: synthetic prefix trees and batches of real traces."""
