#!/bin/bash
cd /workspace
if python3 -B -c 'from calendar_rules import is_leap as f; assert f(2000) and f(2024) and not f(1900) and not f(2023)'; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
