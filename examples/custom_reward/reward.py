"""A reward of your own: how close is the sum? 1 when it is right, less the further away it is."""

import re


def closeness(data_source, solution_str, ground_truth, extra_info):
    numbers = re.findall(r"\d+", solution_str)
    distance = abs(int(numbers[-1]) - int(ground_truth)) if numbers else 100
    return {"score": max(0.0, 1 - distance / 20), "acc": float(distance == 0), "distance": distance}
