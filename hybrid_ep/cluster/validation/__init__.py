"""Validation of a cluster: pairs of hosts in rounds, hosts that are fit, and the report.

    rounds.py     pairs of hosts, in rounds in which no host is in two pairs
    bisection.py  which of many hosts make a job fail, by halves; what runs next
    results.py    the results folder: what was found, file by file (schemas.json); the contract with the playbooks
    judge.py      bandwidth of the test jobs against the figures of the platform's profile
    cluster.py    all of it as one: nodes, findings between nodes, jobs, and which hosts are fit
    formats.py, page.py (page.html, page.css, page.js)   the same for people and for CI
    command.py    `hybrid-ep validation`
    playbooks.py  its commands that only the playbooks call, which fill the folder: record.py, perftest.py

Knows the doctor's model and adds no check of a node: a node's report is what `hybrid-ep doctor --json` wrote there.
"""
