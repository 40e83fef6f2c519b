{{/* Words after `vericache serve`. */}}
{{- define "vericache.arguments" -}}
{{- with .Values.server -}}
- {{ .model | quote }}
- --port=8000
- --vericache-config=/etc/vericache/vericache.yaml
- --dtype={{ .dtype }}
- --tensor-parallel-size={{ .tensorParallelSize | int64 }}
- --shutdown-timeout={{ .shutdownTimeoutSeconds | int64 }}
{{- if eq $.Values.device "cuda" }}
- --gpu-memory-utilization={{ .gpuMemoryUtilization }}
{{- end }}
{{- with .kvCacheMemoryGib }}
- --kv-cache-memory-bytes={{ mulf (float64 .) 1073741824.0 | int64 }}
{{- end }}
{{- with .revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- with .servedModelName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- with .maxModelLen }}
- --max-model-len={{ int64 . }}
{{- end }}
{{- with .maxNumSeqs }}
- --max-num-seqs={{ int64 . }}
{{- end }}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables the chart sets. The root file system is read-only: everything that is written goes to /cache. */}}
{{- define "vericache.environment" -}}
- name: HOME
  value: /cache
- name: HF_HOME
  value: {{ ternary .Values.persistence.mountPath "/cache/huggingface" .Values.persistence.enabled | quote }}
- name: VLLM_LOGGING_LEVEL
  value: {{ .Values.server.logLevel }}
- name: VLLM_NO_USAGE_STATS
  value: "1"
{{- with .Values.server.apiKeySecret }}
{{- if .name }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .name | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- with .Values.server.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "vericache.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- $gpus := dict .Values.gpu.resourceName (int .Values.gpu.count) -}}
{{- $_ := set $resources "limits" (merge $gpus (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* A probe's values are Kubernetes' own fields, but for the path: whatever is set reaches the pod. */}}
{{- define "vericache.probe" -}}
httpGet:
  path: {{ .path | quote }}
  port: http
{{- range $field, $value := omit . "path" }}
{{- if not (kindIs "invalid" $value) }}
{{ $field }}: {{ int64 $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "vericache.volumes" -}}
- name: settings
  configMap:
    name: {{ include "vericache.fullname" . | quote }}
- name: cache
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- if gt (float64 .Values.memory.sharedGib) 0.0 }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ mulf (float64 .Values.memory.sharedGib) 1024.0 | int64 }}Mi
{{- end }}
{{- if .Values.persistence.enabled }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "vericache.claimName" . | quote }}
    {{- if eq .Values.persistence.accessMode "ReadOnlyMany" }}
    readOnly: true
    {{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "vericache.mounts" -}}
- name: settings
  mountPath: /etc/vericache
  readOnly: true
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
{{- if gt (float64 .Values.memory.sharedGib) 0.0 }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if .Values.persistence.enabled }}
- name: models
  mountPath: {{ .Values.persistence.mountPath | quote }}
  {{- if eq .Values.persistence.accessMode "ReadOnlyMany" }}
  readOnly: true
  {{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
