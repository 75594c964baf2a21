#!/bin/bash
sed -i 's/return .*/return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)/' /workspace/calendar_rules.py
